"""A batch's numbers on the device: ids, positions, slots and block tables in one range, brought there by one copy.

    tokens │ positions │ output rows │ masks │ of each group of layers: slots, and of bundles positions, tables, rows,
    counts, members │ spans of states │ tables and spans

A table is the position that it starts with and its block ids; a bundle holds the number at which its table begins.
A sequence's few rows (a token, and drafts) or its tree of drafts are a bundle (kernels/attention): a long context is
split over the whole GPU, and masks say which rows of a bundle each row sees (kernels/seen_rows). Where all sequences
are bundles, it is a decode batch. Otherwise, sequences with many rows are cut into spans (kernels/prefill), a few rows
without a tree are a bundle each, so that they need no kernel of their own, and the rows of bundles are taken out of
the batch: `members` says which these are, and masks and bundles count in that order. Tables and spans come last, so
that only as much is copied as is used.

A plan may have more rows than the batch (see `CudaBackend.bucket`). What pads it is inert: such a row has slot -1, so
that nothing of it is stored, and a position one block before its table begins, so that it reads no context. What is
computed for it reaches no other row, and is cut off at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from motley.backends.cuda.kernels.attention import Tables
from motley.backends.cuda.kernels.prefill import SPAN_NUMBERS, span_rows, spans
from motley.backends.cuda.kernels.seen_rows import CHAIN
from motley.backends.cuda.layouts import BUNDLE_ROWS, Layout, decode_layout
from motley.backends.paged import Batch, StateBatch, Table

_ALIGNMENT = 4  # numbers: parts begin at 16 bytes, so that kernels are compiled for one case
_FEW_ROWS = 8  # of a sequence without a tree, that are not worth a span beside others' spans
_MAX_CHAIN = 16  # rows of a bundle that is no tree
# Numbers for tables to begin with, and for each of the first rows: 5,000 tokens.
_SPARE, _ROW_SPARE, _SPARE_ROWS = 4096, 160, 128
_FEWEST_ROWS = span_rows(1, most=1 << 30)  # of a span that is full
STATE_NUMBERS = 9  # of a sequence with a recurrent state: kvcache.state_arena.StateSpan
_NOTHING = np.zeros(0, dtype=np.int32)
_GAP = np.zeros(1, dtype=np.int32)  # where a table's first position goes


@dataclass(frozen=True)
class Chunk:
    """A sequence with many rows."""

    first_row: int
    n_rows: int
    position: int  # of its first row
    first: int  # the position that its table starts with
    table: int  # where that is
    n_spans: int


@dataclass(frozen=True, eq=False)
class Place:
    """The places that one batch writes and reads in one group of layers. On the device, int32."""

    slots: torch.Tensor  # (rows,)
    tables: Tables  # of bundles; beside spans, of the rows that are taken out of the batch
    members: torch.Tensor  # beside spans: which rows of the batch these are
    numbers: torch.Tensor  # all there is, tables included
    spans: torch.Tensor  # (spans, SPAN_NUMBERS): of sequences with many rows, one after the other
    span_rows: int  # the most that one has
    chunks: tuple[Chunk, ...]  # these sequences

    @property
    def is_decode(self) -> bool:
        return not len(self.spans)


@dataclass(frozen=True, eq=False)
class _Group:
    """One group's part of a batch."""

    number: int
    parts: tuple[slice, ...]  # slots, positions, tables, rows, counts, members
    n_bundles: int
    most_rows: int  # of a bundle
    n_members: int  # rows of bundles beside spans
    spans: slice  # of the other rows
    span_rows: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, eq=False)
class Staged:
    """A batch on the device. Valid until the next one is written. To replay a graph, `address` is enough."""

    memory: torch.Tensor  # int32: everything
    names: Mapping[str, slice]
    masks: slice
    groups: tuple[_Group, ...]
    states: slice  # spans of recurrent states
    n_states: int  # sequences; in a decode batch as many as rows, most of them padding

    @property
    def address(self) -> int:
        """The next batch's is the same, unless tables have outgrown the memory."""
        return self.memory.data_ptr()

    @property
    def is_decode(self) -> bool:
        return all(group.spans.start == group.spans.stop for group in self.groups)

    @property
    def layout(self) -> Layout:
        """The properties of a decode batch that a captured graph depends on."""
        return (self.groups[0].n_bundles, self.groups[0].most_rows) if self.groups else (0, 1)

    @cached_property
    def values(self) -> dict[str, torch.Tensor]:
        """int32, by the input's name."""
        return {name: self.memory[part] for name, part in self.names.items()}

    @cached_property
    def spans(self) -> torch.Tensor:
        """Spans of recurrent states: int32 (sequences, STATE_NUMBERS); padded in a decode batch, and at least one."""
        n_used = len(self.memory[self.states]) // STATE_NUMBERS if self.is_decode else max(1, self.n_states)
        return self.memory[self.states].view(-1, STATE_NUMBERS)[:n_used]

    @cached_property
    def places(self) -> dict[int, Place]:
        """The places of each group, by its number."""
        return {group.number: self._place(group) for group in self.groups}

    def _place(self, group: _Group) -> Place:
        slots, *columns, members = (self.memory[part] for part in group.parts)
        positions, tables, rows, counts = (column[: group.n_bundles] for column in columns)
        masks = self.memory[self.masks].view(-1, 2)
        return Place(
            slots,
            Tables(
                self.memory[1:, None], self.memory, tables, positions, group.most_rows, rows, counts, masks
            ),
            members[: group.n_members],
            self.memory,
            self.memory[group.spans].view(-1, SPAN_NUMBERS),
            group.span_rows,
            group.chunks,
        )


class Staging:
    """The memory of one plan's batches, here and on the device."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        n_groups: int,
        block_size: int,
        max_span_rows: int,
        device: torch.device,
        has_states: bool = False,
    ) -> None:
        """`sizes`: numbers of each input, of the plan; the largest is its rows. `max_span_rows`: of a span.
        `has_states`: whether there are recurrent states.
        """
        self._device = device
        self._block_size = block_size
        self._max_span_rows = max_span_rows
        self._n_rows = max(sizes.values(), default=0)
        self._names: dict[str, slice] = {}
        self._groups: list[tuple[slice, ...]] = []
        start = 0
        for name, size in sizes.items():
            self._names[name] = slice(start, start + size)
            start = _aligned(start + size)
        self._masks = slice(start, start + 2 * self._n_rows)
        start = _aligned(self._masks.stop)
        for _ in range(n_groups):
            parts = []
            for _ in range(6):  # slots, positions, tables, rows, counts, members
                parts.append(slice(start, start + self._n_rows))
                start = _aligned(start + self._n_rows)
            self._groups.append(tuple(parts))
        self._states = slice(start, start + STATE_NUMBERS * self._n_rows * has_states)
        start = _aligned(self._states.stop)
        self._n_fixed = start
        self._copied: torch.cuda.Event | None = None
        self._allocate(start + _SPARE + _ROW_SPARE * min(self._n_rows, _SPARE_ROWS))

    def write(
        self,
        inputs: Mapping[str, torch.Tensor],
        batches: Mapping[int, Batch],
        states: StateBatch | None = None,
    ) -> Staged:
        """Bring a batch to the device; `batches`: its part of each group, by the group's number."""
        max_numbers = self._n_fixed + sum(map(_n_numbers, batches.values()))
        if max_numbers > len(self._here):
            self._allocate(2 * max_numbers)
        if self._copied is not None:
            self._copied.synchronize()  # the last batch has left
        numbers: npt.NDArray[np.int32] = self._here.numpy()
        there = {name: given for name, given in inputs.items() if given.is_cuda}
        for name, part in self._names.items():
            _fill(numbers[part], _NOTHING if name in there else inputs[name].numpy(), 0)
        cursor, groups = self._n_fixed, []
        if batches:
            self._write_masks(numbers, next(iter(batches.values())))
        for (number, batch), parts in zip(batches.items(), self._groups, strict=True):
            group, cursor = self._write_group(numbers, number, batch, parts, cursor)
            groups.append(group)
        if states is not None:
            _fill(numbers[self._states], states.table.ravel(), 0)  # a span without rows is padding
        self._there[:cursor].copy_(self._here[:cursor], non_blocking=True)
        for (
            name,
            given,
        ) in there.items():  # ids that were chosen on the device, and that the host may not know yet
            self._there[self._names[name]][: len(given)].copy_(given)
        if self._device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        n_states = 0 if states is None else len(states.table)
        return Staged(self._there, self._names, self._masks, tuple(groups), self._states, n_states)

    def _write_masks(self, numbers: npt.NDArray[np.int32], batch: Batch) -> None:
        """Writes rows' masks if a bundle has several rows: in the batch's order, or beside spans in the members'."""
        is_decode, row = all(map(_is_short, batch.tables)), 0
        if all(table.n_rows == 1 for table in batch.tables):
            return
        for table in batch.tables:
            if is_decode or _is_few(table):
                of_chain = CHAIN[: table.n_rows] if is_decode else CHAIN[np.zeros(table.n_rows, np.int64)]
                masks = of_chain if table.seen is None else table.seen
                first = self._masks.start + 2 * row
                numbers[first : first + 2 * table.n_rows] = masks.view(np.int32)
                row += table.n_rows

    def _write_group(
        self,
        numbers: npt.NDArray[np.int32],
        number: int,
        batch: Batch,
        parts: tuple[slice, ...],
        cursor: int,
    ) -> tuple[_Group, int]:
        """Write a group's part, its tables and spans from `cursor` on; also gives where these end."""
        pieces: list[npt.NDArray[np.int32]] = []
        bundles: list[tuple[int, int, int, int]] = []  # position, table, row, count
        chunks: list[tuple[Table, int]] = []  # sequences with many rows, and where their tables are
        firsts, starts, stop = [], [], cursor
        members: list[int] = []  # beside spans: the rows of bundles
        is_decode, longest = all(map(_is_short, batch.tables)), 1
        for table in batch.tables:
            start, stop = stop, stop + 1 + len(table.blocks)
            pieces += (_GAP, table.blocks)
            starts.append(start)
            firsts.append(table.first)
            if is_decode:
                bundles.append((table.position, start, table.first_row, table.n_rows))
            elif not _is_few(table):
                chunks.append((table, start))
                continue
            elif table.seen is not None:
                bundles.append((table.position, start, len(members), table.n_rows))
            else:
                n = len(members)
                bundles += [(table.position + i, start, n + i, 1) for i in range(table.n_rows)]
            longest = max(longest, bundles[-1][3])
            if not is_decode:
                members += range(table.first_row, table.first_row + table.n_rows)
        np.concatenate(pieces, out=numbers[cursor:stop])
        numbers[starts] = firsts
        slots, *columns, rows = parts
        _fill(numbers[slots], batch.slots.numpy(), -1)
        inert = firsts[0] - self._block_size, cursor, 0, 0
        for part, values, pad in zip(columns, zip(*bundles, strict=True), inert, strict=False):
            _fill(numbers[part], np.array(values, dtype=np.int32), pad)
        numbers[rows][: len(members)] = members
        if is_decode:
            n_bundles, most_rows = decode_layout(self._n_rows, len(bundles), longest)
        else:
            n_bundles, most_rows = len(bundles), next(n for n in BUNDLE_ROWS if n >= longest)
        size = span_rows(max((table.n_rows for table, _ in chunks), default=1), self._max_span_rows)
        first_span = stop = _aligned(stop)
        found = []
        for table, start in chunks:
            own = spans(table.first_row, table.n_rows, table.position, start, size)
            numbers[stop : stop + own.size] = own.ravel()
            stop += own.size
            found.append(Chunk(table.first_row, table.n_rows, table.position, table.first, start, len(own)))
        group = _Group(
            number, parts, n_bundles, most_rows, len(members), slice(first_span, stop), size, tuple(found)
        )
        return group, stop

    def _allocate(self, n_numbers: int) -> None:
        is_gpu = self._device.type == "cuda"
        self._here = torch.zeros(n_numbers, dtype=torch.int32, pin_memory=is_gpu)
        self._there = torch.zeros(n_numbers, dtype=torch.int32, device=self._device)
        self._copied = None


def _is_short(table: Table) -> bool:
    """Whether a table's rows can be a bundle of a decode batch."""
    return table.n_rows <= _MAX_CHAIN or table.seen is not None


def _is_few(table: Table) -> bool:
    """Whether a table's rows are no span beside others' spans."""
    return table.n_rows <= _FEW_ROWS or table.seen is not None


def _fill(part: npt.NDArray[np.int32], values: npt.NDArray[np.integer[Any]], pad: int) -> None:
    part[: len(values)] = values
    part[len(values) :] = pad


def _n_numbers(batch: Batch) -> int:
    """The most numbers that a group's tables and spans have."""
    n_blocks, n_tables = sum([len(table.blocks) for table in batch.tables]), len(batch.tables)
    n_spans = n_tables + len(batch.slots) // _FEWEST_ROWS
    return n_blocks + n_tables + _ALIGNMENT + SPAN_NUMBERS * n_spans


def _aligned(n: int) -> int:
    return -(-n // _ALIGNMENT) * _ALIGNMENT
