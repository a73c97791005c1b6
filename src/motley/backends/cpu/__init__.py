"""The CPU backend: C++ kernels, and the compiler from device plans to native programs."""

from motley.backends.cpu.backend import CpuBackend, ExactCpuBackend
from motley.backends.cpu.lookup import look_up, new_text_index
from motley.backends.cpu.native import SharedGroup, instruction_sets, is_available
from motley.backends.cpu.sampler import NONE_LEFT, choose_rows, row_settings

__all__ = [
    "NONE_LEFT",
    "CpuBackend",
    "ExactCpuBackend",
    "SharedGroup",
    "choose_rows",
    "instruction_sets",
    "is_available",
    "look_up",
    "new_text_index",
    "row_settings",
]
