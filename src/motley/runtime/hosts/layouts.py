"""The layout of one collective's parts in the messages of processes. Made once for each collective of a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from motley.graph import Shape
from motley.runtime.group import PartSizes
from motley.runtime.hosts.wire import decode, is_coded, wire_bytes


@dataclass(frozen=True, slots=True)
class Span:
    """A device's part in the message of its process."""

    device: int
    first: int  # item of the message
    n_items: int
    n_values: int
    shape: Shape


@dataclass(frozen=True, slots=True)
class Layout:
    """The messages of one collective, seen from one process."""

    wire: str | None  # how parts are coded; None: they travel as they are
    dtype: torch.dtype  # of items: uint8 if parts are coded
    counts: tuple[int, ...]  # items that each process sends, by rank
    spans: tuple[tuple[Span, ...], ...]  # by rank
    reads: bool  # whether this process needs the result
    receivers: tuple[int, ...]  # the processes that need the parts of this one

    @staticmethod
    def of(sizes: PartSizes, owners: Sequence[int], rank: int, wire: str) -> Layout:
        """`owners`: the rank of each device's process. `wire`: of the crew."""
        used = wire if sizes.is_sum and is_coded(wire, sizes.dtype) else None
        ranks = range(max(owners) + 1)
        spans = tuple(_spans(sizes, owners, each, used) for each in ranks)
        readers = ranks if sizes.reader is None else (owners[sizes.reader],)
        return Layout(
            used,
            torch.uint8 if used else sizes.dtype,
            tuple(sum(span.n_items for span in own) for own in spans),
            spans,
            rank in readers,
            tuple(reader for reader in readers if reader != rank),
        )

    @property
    def max_bytes(self) -> int:
        """The bytes of the longest message."""
        return max(self.counts) * self.dtype.itemsize

    def parts(self, messages: Mapping[int, torch.Tensor], n_devices: int) -> list[torch.Tensor | None]:
        """The parts in the messages of processes, in the order of devices."""
        found: list[torch.Tensor | None] = [None] * n_devices
        for rank, message in messages.items():
            for span in self.spans[rank]:
                part, is_alone = message, span.n_items == len(message)
                if not is_alone:
                    part = message[span.first : span.first + span.n_items]
                if self.wire:
                    part = decode(self.wire, part if is_alone else part.clone(), span.n_values)
                found[span.device] = part.view(span.shape)
        return found


def _spans(sizes: PartSizes, owners: Sequence[int], rank: int, wire: str | None) -> tuple[Span, ...]:
    found: list[Span] = []
    first = 0
    for device, (owner, shape) in enumerate(zip(owners, sizes.shapes, strict=True)):
        if owner == rank and shape is not None:
            n_values = math.prod(shape)
            n_items = wire_bytes(wire, n_values) if wire else n_values
            found.append(Span(device, first, n_items, n_values, shape))
            first += n_items
    return tuple(found)
