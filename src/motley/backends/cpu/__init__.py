"""The CPU backend: C++ kernels, and the compiler from device plans to native programs."""

from motley.backends.cpu.backend import CpuBackend, ExactCpuBackend
from motley.backends.cpu.native import SharedGroup, is_available

__all__ = ["CpuBackend", "ExactCpuBackend", "SharedGroup", "is_available"]
