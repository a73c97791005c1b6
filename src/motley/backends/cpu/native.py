"""The compiled module, if it is there, and the numbers that it knows formats, functions and cache types by."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

try:
    core: Any = import_module("motley._core")
except ImportError:  # run from a source tree that was never built
    core = None


class _NeverRaisedError(Exception):
    """Stands in for the module's own error where there is no module."""


# Raised by a program that waits for another device's when that one has failed.
NativeHungUpError: type[Exception] = _NeverRaisedError if core is None else core.HungUpError


def is_available() -> bool:
    return core is not None


# In the order of csrc/kernels.hpp.
PLAIN_FORMATS = ("F32", "F16", "BF16")
_BLOCK32_FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
_K_FORMATS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_FORMATS = (*PLAIN_FORMATS, *_BLOCK32_FORMATS, *_K_FORMATS, "IQ4_NL", "IQ4_XS")
_FUNCTIONS = ("", "silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh")
_CACHE_KINDS = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
FORMATS = {name: number for number, name in enumerate(_FORMATS)}
FUNCTIONS = {name: number for number, name in enumerate(_FUNCTIONS)}
CACHE_KINDS = {name: number for number, name in enumerate(_CACHE_KINDS)}
MAX_HEAD_DIM = 512
MAX_RANGES = 32  # of ids that a device owns
MAX_GROUP = 64  # query heads that share a KV head
GROUP_ROWS = 16  # of a repacked weight


def meeting_place(n_devices: int) -> Any:
    """Where native programs of several devices of this process can meet; None without the module."""
    return core.Group(n_devices) if core is not None else None


def address(tensor: torch.Tensor | None) -> int:
    """Of a contiguous tensor's first value; 0 for none."""
    if tensor is None:
        return 0
    assert tensor.is_contiguous(), "kernels take dense tensors"
    return tensor.data_ptr()
