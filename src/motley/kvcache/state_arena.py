"""The bytes of recurrent states on one device: for each part of each layer, a plane of slots and one of rings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from motley.graph.values import StateSequence
from motley.kvcache.states import NO_SLOT
from motley.kvcache.store import Allocate

STATE_TYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
_PENDING_BYTES = 4  # of each value of a ring, which is always float32


@dataclass(frozen=True)
class StatePart:
    """One part of a layer's state, as one device has it."""

    name: str  # of the graph's input
    layer: int
    shape: tuple[int, ...]
    pending_shape: tuple[int, ...]  # what is stored of one pending token

    def slot_bytes(self, kind: str) -> int:
        return prod(self.shape) * STATE_TYPES[kind].itemsize

    def ring_bytes(self, n_pending: int) -> int:
        return n_pending * prod(self.pending_shape) * _PENDING_BYTES


@dataclass(frozen=True)
class StateLayout:
    """The layout of all states of one device."""

    kind: str  # a name in STATE_TYPES
    parts: tuple[StatePart, ...]
    n_slots: int
    n_rings: int
    n_pending: int


@dataclass(frozen=True, slots=True)
class StateSpan:
    """One sequence's rows in a batch, and where its state is read and written."""

    first_row: int  # of the batch; its rows are adjacent
    n_rows: int
    position: int  # of the first row
    source: int  # the slot of the state that includes `n_read` tokens; NO_SLOT: zeros
    n_read: int
    source_ring: int  # of the tokens from n_read to position; read before anything is written
    target: int  # the slot for the state that includes `n_written` tokens
    n_written: int
    target_ring: int  # for the rows from n_written on


@dataclass(frozen=True)
class StateBatch:
    """The slots that a batch reads and writes states in."""

    spans: tuple[StateSpan, ...]

    @property
    def targets(self) -> list[int]:
        return [span.target for span in self.spans]

    @cached_property
    def table(self) -> npt.NDArray[np.int64]:
        """The spans as int64 (spans, 9), in the order of their fields: what native kernels read."""
        rows = [astuple(span) for span in self.spans]
        return np.array(rows, np.int64).reshape(len(rows), 9)


@dataclass(frozen=True, eq=False)
class StatePlanes:
    """The bytes of one part of a layer's state."""

    states: torch.Tensor  # (slots, *shape)
    rings: torch.Tensor  # float32 (rings, tokens, *pending shape)
    group: int
    layer: int

    def on(self, batch: StateBatch) -> BatchState:
        """The graph's input for a batch."""
        return BatchState(self, batch)


@dataclass(frozen=True, eq=False, slots=True)
class BatchState:
    """One part of a layer's state, and where a batch reads and writes it (graph.values.StateLayer)."""

    layer: StatePlanes
    batch: StateBatch

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.layer.states.shape[1:])

    def sequences(self) -> Iterator[StateSequence]:
        for span in self.batch.spans:
            yield _SpanState(self.layer, span)


class _SpanState:
    """One sequence's state (graph.values.StateSequence)."""

    def __init__(self, layer: StatePlanes, span: StateSpan) -> None:
        self._layer, self._span = layer, span
        self.rows = slice(span.first_row, span.first_row + span.n_rows)
        self.n_folded = span.n_written - span.position

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        states, rings, span = self._layer.states, self._layer.rings, self._span
        if span.source == NO_SLOT:
            state = torch.zeros(states.shape[1:], device=states.device)
        else:
            state = states[span.source].float().clone()
        if span.n_read == span.position:
            return state, rings.new_zeros((0, *rings.shape[2:]))
        return state, rings[span.source_ring, self._places(span.n_read, span.position)]

    def write(self, state: torch.Tensor, pending: torch.Tensor) -> None:
        layer, span = self._layer, self._span
        layer.states[span.target] = state.to(layer.states.dtype)
        if len(pending):
            places = self._places(span.n_written, span.position + span.n_rows)
            layer.rings[span.target_ring, places] = pending

    def _places(self, start: int, end: int) -> torch.Tensor:
        return torch.arange(start, end) % self._layer.rings.shape[1]


class StateArena:
    """The states of one device."""

    def __init__(self, layout: StateLayout, group: int, allocate: Allocate, allocate_ring: Allocate) -> None:
        """`allocate`: for planes whose first axis is slots."""
        dtype = STATE_TYPES[layout.kind]
        self.planes = {
            part.name: StatePlanes(
                allocate((layout.n_slots, *part.shape), dtype),
                allocate_ring((layout.n_rings, layout.n_pending, *part.pending_shape), torch.float32),
                group,
                part.layer,
            )
            for part in layout.parts
        }

    @property
    def n_bytes(self) -> int:
        planes = (plane for part in self.planes.values() for plane in (part.states, part.rings))
        return sum(plane.numel() * plane.itemsize for plane in planes)

    @property
    def slot_bytes(self) -> int:
        """The bytes of all slots, without rings."""
        return sum(part.states.numel() * part.states.itemsize for part in self.planes.values())

    def store_random(self, slots: Sequence[int]) -> None:
        for part in self.planes.values():
            for slot in slots:
                part.states[slot] = torch.randn(part.states.shape[1:]).to(part.states) / 16

    def gather(self, layer: int, slot: int) -> dict[str, torch.Tensor]:
        """This device's parts of a layer's state, by the names of the graph's inputs."""
        return {name: part.states[slot].cpu() for name, part in self.planes.items() if part.layer == layer}

    def scatter(self, slot: int, parts: Mapping[str, torch.Tensor]) -> None:
        """The reverse of `gather`. Parts that this device does not have are left out."""
        for name, state in parts.items():
            if name in self.planes:
                planes = self.planes[name].states
                planes[slot] = state.to(planes.device)
