"""Ops that change a tensor's state: the collectives, and ops without communication that only slice or pad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from motley.graph import F32, I32, Op, Shape, Tensor
from motley.ownership import Word


@dataclass(frozen=True)
class Collective(Op):
    """An op that communicates with other devices. All devices that take part run these ops in the same order.

    `members`: the devices that take part, in order; empty: all devices of the crew. Send and Receive do not use it.
    """

    members: tuple[int, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class AllReduce(Collective):
    """Partial → mirrored: the sum of all devices' addends."""

    name: ClassVar[str] = "all_reduce"

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        return inputs[0].shape


@dataclass(frozen=True)
class AllGather(Collective):
    """Split → mirrored: all devices' parts at their indices."""

    name: ClassVar[str] = "all_gather"
    axis: int
    word: Word

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        (part,) = inputs
        return (*part.shape[: self.axis], len(self.word), *part.shape[self.axis + 1 :])

    def dtype(self, inputs: Sequence[Tensor]) -> str:
        return inputs[0].dtype


@dataclass(frozen=True)
class ReduceScatter(Collective):
    """Partial → split: this device's part of the sum."""

    name: ClassVar[str] = "reduce_scatter"
    axis: int
    word: Word
    device: int

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        (x,) = inputs
        return (*x.shape[: self.axis], self.word.count(self.device), *x.shape[self.axis + 1 :])


@dataclass(frozen=True)
class Broadcast(Collective):
    """The root's tensor, on every device. Only the root has an input."""

    name: ClassVar[str] = "broadcast"
    n_inputs: ClassVar[tuple[int, int]] = (0, 1)
    root: int
    size: Shape
    kind: str = F32

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        return self.size

    def dtype(self, inputs: Sequence[Tensor]) -> str:
        return self.kind


@dataclass(frozen=True)
class Send(Collective):
    """Send a tensor to one device, which receives it. The output is empty."""

    name: ClassVar[str] = "send"
    source: int
    target: int

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        return (0,)


@dataclass(frozen=True)
class Receive(Collective):
    """Receive a tensor from one device."""

    name: ClassVar[str] = "receive"
    n_inputs: ClassVar[tuple[int, int]] = (0, 0)
    source: int
    target: int
    size: Shape
    kind: str = F32

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        return self.size

    def dtype(self, inputs: Sequence[Tensor]) -> str:
        return self.kind


@dataclass(frozen=True)
class Shard(Op):
    """Mirrored → split: this device's indices of an axis."""

    name: ClassVar[str] = "shard"
    axis: int
    word: Word
    device: int

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        (x,) = inputs
        return (*x.shape[: self.axis], self.word.count(self.device), *x.shape[self.axis + 1 :])

    def dtype(self, inputs: Sequence[Tensor]) -> str:
        return inputs[0].dtype

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return take(inputs[0], self.axis, self.word, self.device)


@dataclass(frozen=True)
class Place(Op):
    """Split → partial: this device's part at its indices, zeros elsewhere."""

    name: ClassVar[str] = "place"
    axis: int
    word: Word
    device: int

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        (part,) = inputs
        return (*part.shape[: self.axis], len(self.word), *part.shape[self.axis + 1 :])

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        (part,) = inputs
        shape = (*part.shape[: self.axis], len(self.word), *part.shape[self.axis + 1 :])
        whole = part.new_zeros(shape)
        put(whole, part, self.axis, self.word, self.device)
        return whole


@dataclass(frozen=True)
class Zeros(Op):
    """Zeros: an addend that changes nothing, or an empty part."""

    name: ClassVar[str] = "zeros"
    n_inputs: ClassVar[tuple[int, int]] = (0, 0)
    is_constant: ClassVar[bool] = True
    size: Shape
    kind: str = F32

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        return self.size

    def dtype(self, inputs: Sequence[Tensor]) -> str:
        return self.kind

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.zeros(self.size, dtype=torch.int32 if self.kind == I32 else torch.float32)


def take(whole: torch.Tensor, axis: int, word: Word, device: int) -> torch.Tensor:
    """A device's part of a tensor, along `axis`."""
    ranges = list(word.global_ranges(device))
    if not ranges:
        return whole.narrow(axis, 0, 0)
    return torch.cat([whole.narrow(axis, start, stop - start) for start, stop in ranges], axis)


def put(whole: torch.Tensor, part: torch.Tensor, axis: int, word: Word, device: int) -> None:
    """Write a device's part to its indices of `whole`."""
    done = 0
    for start, stop in word.global_ranges(device):
        whole.narrow(axis, start, stop - start).copy_(part.narrow(axis, done, stop - start))
        done += stop - start
