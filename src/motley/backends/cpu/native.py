"""The compiled module, if it is there, and the numbers by which it knows formats, functions and cache types."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from motley.backends.base import DeviceMessages

try:
    core: Any = import_module("motley._core")
except ImportError:  # run from a source tree that was never built
    core = None


def is_available() -> bool:
    return core is not None


def instruction_sets() -> list[str]:
    """The instruction sets with kernels that this machine can run, the best first; none without the module."""
    return [] if core is None else core.instruction_sets()


def _exported(name: str) -> dict[str, int]:
    """A table of the module, from names to its own numbers; empty without it, when no native backend can be made."""
    return {} if core is None else dict(getattr(core, name))


FORMATS = _exported("FORMATS")
ROW_FORMATS = _exported("ROW_FORMATS")  # that kernels also read in the file's layout
FUNCTIONS = _exported("FUNCTIONS")
CACHE_TYPES = _exported("CACHE_TYPES")
PLAIN_FORMATS = ("F32", "F16", "BF16")
MAX_PARTS: int = 0 if core is None else core.MAX_PARTS  # products of one pass
MAX_RANGES: int = 0 if core is None else core.MAX_RANGES  # of ids that a device owns
HAS_RECURRENT = core is not None and hasattr(
    core, "StateBatch"
)  # False: built before there were such kernels
HAS_SAMPLER = core is not None and hasattr(core, "RowSampler")
HAS_STEADY = core is not None and hasattr(core.Team, "rows")
HAS_LOOKUP = core is not None and hasattr(getattr(core, "TextIndex", None), "index")
HAS_SHARED_GROUP = core is not None and hasattr(core, "SharedGroup")
HAS_MESSAGES = core is not None and hasattr(core, "TaggedMemory")
_MAX_MEMBERS = 64
MAX_HEAD_DIM = 512
MAX_GROUP = 64  # query heads that share a KV head
GROUP_ROWS = 16  # repacked weights have room for a multiple of this; every instruction set's groups divide it
MAX_EXPERT_GROUPS = 64
MAX_EXPERTS = 1 << 18  # whose scores fit a thread's scratch memory


class NativeRendezvous:
    """The rendezvous of native programs of several devices (base.Rendezvous)."""

    def __init__(self, group: Any, groups: Sequence[tuple[int, ...]] = ()) -> None:
        """`group`: of all devices of the crew, the module's Group or its SharedGroup. `groups`: devices of this process
        that have collectives of their own.
        """
        self.group = group
        self._groups = {members: core.Group(len(members)) for members in groups}
        self.aborted_error: type[Exception] = core.AbortedError
        self._messages: DeviceMessages | None = None
        self.tagged: Any = None  # the native side of `messages`

    def attach(self, messages: DeviceMessages) -> bool:
        """The other device of a crew of two has messages of its own; False: the native module has none."""
        if not HAS_MESSAGES:
            return False
        self._messages = messages
        messages.aborted_error = self.aborted_error
        self.tagged = core.TaggedMemory(*messages.addresses)
        return True

    def among(self, members: tuple[int, ...]) -> tuple[Any, tuple[int, ...]]:
        """The group of a collective's devices, and these devices in the group's order. Empty `members`: all devices."""
        if members:
            return self._groups[members], members
        return self.group, tuple(range(self.group.n_devices))

    @staticmethod
    def is_shared(group: Any) -> bool:
        """Whether a group has devices of other processes."""
        return HAS_SHARED_GROUP and isinstance(group, core.SharedGroup)

    def exchange(
        self,
        members: tuple[int, ...],
        device: int,
        part: torch.Tensor | None,
        others: Mapping[int, torch.Tensor],
    ) -> None:
        """The part of a device that is no native program (base.HostRendezvous), in a group of this process."""
        group, crew = self.among(members)
        own = crew.index(device)
        if not group.show(own, address(part), []):
            raise self.aborted_error("another device has failed")
        for other, out in others.items():
            source = group.part(own, crew.index(other))
            ctypes.memmove(address(out), source, out.nbytes)
        if not group.leave(own):
            raise self.aborted_error("another device has failed")

    def send(self, source: int, target: int, values: torch.Tensor) -> None:
        if not self.group.send(source, target, address(values), values.numel()):
            raise self.aborted_error("another device has failed")

    def receive(self, source: int, target: int, out: torch.Tensor) -> None:
        if not self.group.receive(source, target, address(out), out.numel()):
            raise self.aborted_error("another device has failed")

    def abort(self) -> None:
        if self.tagged is not None:
            self.tagged.abort()
        for group in (self.group, *self._groups.values()):
            group.abort()

    def reset(self) -> None:
        for group in (self.group, *self._groups.values()):
            group.reset()
        if self.tagged is not None and self._messages is not None:
            tag = self.tagged.tag + 2  # a device may be one run ahead of the other
            self._messages.reset(tag)
            self.tagged.reset(tag)


class SharedGroup:
    """Members in several processes of one machine that exchange values in a file of memory.

    Values have 4 bytes. `file`: a descriptor; the memory, from `offset` on, is zero at first.
    """

    def __init__(self, file: int, offset: int, n_members: int) -> None:
        self.native: Any = core.SharedGroup(file, offset, n_members)

    @staticmethod
    def n_bytes(n_members: int) -> int:
        """The memory that it needs. 0: the native module has no such groups, or there are too many members."""
        return core.SharedGroup.n_bytes(n_members) if HAS_SHARED_GROUP and n_members <= _MAX_MEMBERS else 0

    def rendezvous(self, groups: Sequence[tuple[int, ...]] = ()) -> NativeRendezvous:
        """The group as a rendezvous of native programs. `groups`: of this process's members, with collectives of their
        own.
        """
        return NativeRendezvous(self.native, groups)

    def exchange(
        self, member: int, values: torch.Tensor, counts: Sequence[int]
    ) -> dict[int, torch.Tensor] | None:
        """The values of all other members, of these numbers. They may be read until the next call. None: aborted."""
        if not self.native.show(member, address(values), list(counts)):
            return None
        return {
            other: _values_at(self.native.part(member, other), n, values.dtype)
            for other, n in enumerate(counts)
            if other != member
        }

    def send(self, source: int, target: int, values: torch.Tensor) -> bool:
        """Waits while the previous message is unread. False: aborted."""
        is_sent: bool = self.native.send(source, target, address(values), values.numel())
        return is_sent

    def receive(self, source: int, target: int, out: torch.Tensor) -> bool:
        """Waits for a message. False: aborted."""
        is_there: bool = self.native.receive(source, target, address(out), out.numel())
        return is_there

    def abort(self) -> None:
        """Makes all functions of this object fail, those that wait included."""
        self.native.abort()


def _values_at(place: int, n_values: int, dtype: torch.dtype) -> torch.Tensor:
    if n_values == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_uint8 * (n_values * dtype.itemsize)).from_address(place), dtype=dtype)


def address(tensor: torch.Tensor | None) -> int:
    """The address of a contiguous tensor's first value; 0 for None."""
    if tensor is None:
        return 0
    assert tensor.is_contiguous(), "kernels take dense tensors"
    return tensor.data_ptr()
