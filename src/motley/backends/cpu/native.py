"""The compiled module, if it is there, and the numbers by which it knows formats, functions and cache types."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

try:
    core: Any = import_module("motley._core")
except ImportError:  # run from a source tree that was never built
    core = None


def is_available() -> bool:
    return core is not None


def _exported(name: str) -> dict[str, int]:
    """A table of the module, from names to its own numbers; empty without it, when no native backend can be made."""
    return {} if core is None else dict(getattr(core, name))


FORMATS = _exported("FORMATS")
ROW_FORMATS = _exported("ROW_FORMATS")  # that kernels also read as they lie in a file
FUNCTIONS = _exported("FUNCTIONS")
CACHE_TYPES = _exported("CACHE_TYPES")
PLAIN_FORMATS = ("F32", "F16", "BF16")
MAX_PARTS: int = 0 if core is None else core.MAX_PARTS  # products of one pass
MAX_RANGES: int = 0 if core is None else core.MAX_RANGES  # of ids that a device owns
HAS_RECURRENT = core is not None and hasattr(
    core, "StateBatch"
)  # False: built before there were such kernels
MAX_HEAD_DIM = 512
MAX_GROUP = 64  # query heads that share a KV head
GROUP_ROWS = 16  # repacked weights have room for a multiple of this; every instruction set's groups divide it
MAX_EXPERT_GROUPS = 64
MAX_EXPERTS = 1 << 18  # whose scores fit a thread's scratch memory


class NativeRendezvous:
    """Where native programs of several devices of this process do their collectives (base.Rendezvous)."""

    def __init__(self, n_devices: int) -> None:
        self.group: Any = core.Group(n_devices)
        self.aborted_error: type[Exception] = core.HungUpError

    def abort(self) -> None:
        self.group.abort()

    def reset(self) -> None:
        self.group.reset()


def address(tensor: torch.Tensor | None) -> int:
    """Of a contiguous tensor's first value; 0 for none."""
    if tensor is None:
        return 0
    assert tensor.is_contiguous(), "kernels take dense tensors"
    return tensor.data_ptr()
