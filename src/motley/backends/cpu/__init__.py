"""The CPU backend: C++ kernels, and the compiler from device plans to native programs."""

from motley.backends.cpu.backend import CpuBackend, ExactCpuBackend
from motley.backends.cpu.native import NativeHungUpError, is_available, meeting_place

__all__ = ["CpuBackend", "ExactCpuBackend", "NativeHungUpError", "is_available", "meeting_place"]
