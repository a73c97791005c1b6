"""Further functions of GPU backends: sampling on the device of the logits, and kernels compiled ahead of time.

Needs Triton, so it is imported where a GPU is used, and nowhere else.
"""

from motley.backends.cuda.compiling import (
    Compiler,
    Job,
    Target,
    can_compile_ahead,
    load_compiler,
    load_driver,
    recording,
)
from motley.backends.cuda.manifests import Compiled, Manifest
from motley.backends.cuda.products import load_library
from motley.backends.cuda.sampler import DeviceSampler, RowSettings

__all__ = [
    "Compiled",
    "Compiler",
    "DeviceSampler",
    "Job",
    "Manifest",
    "RowSettings",
    "Target",
    "can_compile_ahead",
    "load_compiler",
    "load_driver",
    "load_library",
    "recording",
]
