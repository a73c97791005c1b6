"""The messages from rank 0 to workers while a crew runs: int32 numbers behind a fixed order, and bytes of the cache.

A worker checks every number against the limits that were agreed on when the crew was opened: a false message is a
ProtocolError, never an access outside of the cache. Block tables are sent as differences to those of the message
before: a decode step is some tens of bytes for each request.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from motley.kvcache.arena import MAX_TREE_ROWS, CacheBatch, GroupBatch, SeenRows, SequenceTable
from motley.kvcache.sequences import BlockCopy, BlockShift
from motley.kvcache.state_arena import StateBatch, StateSpan
from motley.kvcache.states import NO_SLOT
from motley.models import N_EXPERT_USED, BatchShape
from motley.runtime.batch import Numbers, PlacedBatch
from motley.runtime.hosts.protocol import ProtocolError

IntArray = npt.NDArray[np.int32]
MAX_SLOTS = 256  # tokens whose K/V of one layer travel in one message
_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Limits:
    """The limits of the numbers in messages."""

    n_vocab: int
    n_layers: int
    n_experts: int  # 0: a model without experts
    max_tokens: int  # of a batch
    block_size: int
    n_blocks: tuple[int, ...]  # of each group with blocks
    n_state_slots: int = 0  # of the group of recurrent states, which comes last; 0: there is none
    n_state_rings: int = 0
    n_pending: int = 0  # tokens in a ring

    @property
    def max_sequences(self) -> int:
        return self.max_tokens


class Step(NamedTuple):
    """A batch to run, with the shape that plans are made for."""

    shape: BatchShape
    batch: PlacedBatch
    inputs: dict[str, Numbers]
    copies: list[BlockCopy]


class StepWriter:
    """Encodes steps. Knows the block tables that were sent last.

    Of Python's numbers: a step has few, and each call of numpy takes longer than all of them.
    """

    def __init__(self) -> None:
        self._tables: dict[int, list[bytes]] = {}  # those of each group, by place in the batch

    def run(
        self,
        shape: BatchShape,
        batch: PlacedBatch,
        inputs: Mapping[str, Numbers],
        copies: Sequence[BlockCopy],
    ) -> bytes:
        own = batch.shape
        numbers = [own.n_tokens, own.n_outputs, own.n_layers, own.n_experts]
        numbers += [shape.n_tokens, shape.n_outputs, int(own.wants_hidden), int(N_EXPERT_USED in inputs)]
        numbers.append(batch.n_best)
        numbers += _copies(copies)
        names = ["tokens", "positions", "output_rows", *([N_EXPERT_USED] if N_EXPERT_USED in inputs else [])]
        for name in names:
            given = inputs[name]
            numbers += given if isinstance(given, list) else given.tolist()
        self._add_batches(batch.cache, numbers)
        return _packed(numbers)

    def batches(self, batches: Sequence[CacheBatch]) -> bytes:
        """The block tables of a batch, alone."""
        numbers: list[int] = []
        self._add_batches(batches, numbers)
        return _packed(numbers)

    def _add_batches(self, batches: Sequence[CacheBatch], numbers: list[int]) -> None:
        rows = batches[0].spans if isinstance(batches[0], StateBatch) else batches[0].tables
        numbers += [len(rows), *(row.n_rows for row in rows)]
        _add_trees(() if isinstance(batches[0], StateBatch) else batches[0].tables, numbers)
        for group, batch in enumerate(batches):
            if isinstance(batch, StateBatch):
                numbers += batch.table[:, 2:].ravel().tolist()
                continue
            latest = self._tables.get(group, [])
            tables = [bytes(table.blocks) for table in batch.tables]
            for index, (table, blocks) in enumerate(zip(batch.tables, tables, strict=True)):
                n_same = _n_same(latest[index], blocks) if index < len(latest) else 0
                numbers += [table.position, table.first, n_same, len(table.blocks) - n_same]
                numbers += table.blocks[n_same:].tolist()
            self._tables[group] = tables


class StepReader:
    """Decodes and checks steps. Knows the block tables that came last."""

    def __init__(self, limits: Limits, *, as_lists: bool = False) -> None:
        """`as_lists`: inputs are lists, for devices that take them; otherwise tensors."""
        self._limits = limits
        self._as_lists = as_lists
        self._tables = _LatestTables()

    def run(self, payload: bytes) -> Step:
        limits, ints = self._limits, _Ints(payload)
        n_tokens = ints.number(1, limits.max_tokens)
        n_outputs = ints.number(0, n_tokens)
        n_layers = ints.number(0, limits.n_layers)
        n_experts = ints.number(0, limits.n_experts)
        most = 2 * limits.max_tokens + 16
        n_rows, n_logits = ints.number(n_tokens, most), ints.number(n_outputs, most)
        own = BatchShape(n_tokens, n_outputs, n_layers, n_experts, bool(ints.number(0, 1)))
        shape = replace(own, n_tokens=n_rows, n_outputs=n_logits)
        has_experts = ints.number(0, int(limits.n_experts > 0))
        n_best = ints.number(0, limits.n_vocab)
        copies = self._copies(ints)
        inputs = {
            "tokens": ints.array(n_tokens, 0, limits.n_vocab - 1),
            "positions": ints.array(n_tokens, 0, _INT32 // 2),
            "output_rows": ints.array(n_outputs, 0, n_tokens - 1),
        }
        if has_experts:
            inputs[N_EXPERT_USED] = ints.array(n_tokens, 0, limits.n_experts)
        cache = self._batches(ints, n_tokens)
        ints.require_end()
        given = {name: self._given(array) for name, array in inputs.items()}
        batch = PlacedBatch(own, {n: t for n, t in given.items() if n != "tokens"}, cache, n_best)
        return Step(shape, batch, given, copies)

    def _given(self, numbers: IntArray) -> Numbers:
        return numbers.tolist() if self._as_lists else torch.from_numpy(numbers.copy())

    def batches(self, payload: bytes) -> tuple[CacheBatch, ...]:
        ints = _Ints(payload)
        found = self._batches(ints, None)
        ints.require_end()
        return found

    def shifts(self, payload: bytes) -> list[BlockShift]:
        limits, ints, found = self._limits, _Ints(payload), []
        for _ in range(ints.number(0, limits.max_sequences * len(limits.n_blocks))):
            group = ints.number(0, len(limits.n_blocks) - 1)
            copies = self._copies(ints)
            last_slot = limits.n_blocks[group] * limits.block_size - 1
            n_slots, distance = ints.number(0, last_slot + 1), ints.number(0, _INT32 // 2)
            sources, targets = (ints.array(n_slots, 0, last_slot).tolist() for _ in range(2))
            found.append(BlockShift(group, copies, sources, targets, distance))
        ints.require_end()
        return found

    def emptied(self, payload: bytes) -> list[list[int]]:
        ints, limits = _Ints(payload), self._limits
        sizes = [*limits.n_blocks, *([limits.n_state_slots] if limits.n_state_slots else [])]
        found = [ints.array(ints.number(0, size), 0, size - 1).tolist() for size in sizes]
        ints.require_end()
        return found

    def layer_slots(self, payload: bytes, n_slots_of_layer: Sequence[int]) -> tuple[int, torch.Tensor, bytes]:
        """A layer, slots in it, and the bytes after them."""
        n_ints = min(2 + MAX_SLOTS, len(payload) // 4)
        ints = _Ints(payload[: 4 * n_ints])
        layer = ints.number(0, len(n_slots_of_layer) - 1)
        n_slots = ints.number(1, MAX_SLOTS)
        slots = ints.array(n_slots, 0, n_slots_of_layer[layer] - 1)
        return layer, torch.from_numpy(slots.astype(np.int64)), payload[(2 + n_slots) * 4 :]

    def _copies(self, ints: _Ints) -> list[BlockCopy]:
        limits, found = self._limits, []
        for _ in range(ints.number(0, 2 * limits.max_sequences * len(limits.n_blocks))):
            group = ints.number(0, len(limits.n_blocks) - 1)
            source, target = (ints.number(0, limits.n_blocks[group] - 1) for _ in range(2))
            found.append(BlockCopy(group, source, target, ints.number(0, limits.block_size)))
        return found

    def _batches(self, ints: _Ints, n_tokens: int | None) -> tuple[CacheBatch, ...]:
        limits, size = self._limits, self._limits.block_size
        n_rows = ints.array(ints.number(1, limits.max_sequences), 1, limits.max_tokens).tolist()
        if n_tokens is not None and sum(n_rows) != n_tokens:
            raise ProtocolError(f"sequences with {sum(n_rows)} rows in a batch of {n_tokens}")
        trees = self._trees(ints, n_rows)
        batches: list[CacheBatch] = []
        for group, n_blocks in enumerate(limits.n_blocks):
            tables, first_row = [], 0
            for index, n in enumerate(n_rows):
                position = ints.number(0, _INT32 // 2)
                first = ints.number(0, position)
                same = self._tables.first(group, index, ints.number(0, _INT32))
                blocks = np.concatenate([same, ints.array(ints.number(0, _INT32), 0, n_blocks - 1)])
                if first % size or len(blocks) != -(-(position + n - first) // size):
                    raise ProtocolError(f"{len(blocks)} blocks for positions {first} to {position + n - 1}")
                tables.append(SequenceTable(first_row, n, position, first, blocks, trees.get(index)))
                first_row += n
            self._tables.keep(group, [table.blocks for table in tables])
            batches.append(GroupBatch.of(tables, size, at_once=not self._as_lists))
        if limits.n_state_slots:
            batches.append(self._states(ints, n_rows))
        return tuple(batches)

    def _trees(self, ints: _Ints, n_rows: Sequence[int]) -> dict[int, SeenRows]:
        """The rows that each row of a tree sees, by sequence."""
        found: dict[int, SeenRows] = {}
        for _ in range(ints.number(0, 0 if self._limits.n_state_slots else len(n_rows))):
            index = ints.number(0, len(n_rows) - 1)
            n = n_rows[index]
            if n > MAX_TREE_ROWS:
                raise ProtocolError(f"a tree of {n} rows")
            seen = ints.array(2 * n, -_INT32 - 1, _INT32).copy().view(np.uint64)
            if not np.array_equal(seen >> np.arange(n, dtype=np.uint64), np.ones(n, np.uint64)):
                raise ProtocolError("a row of a tree does not see itself, or sees a later one")
            found[index] = seen
        return found

    def _states(self, ints: _Ints, n_rows: Sequence[int]) -> StateBatch:
        limits, spans, first_row = self._limits, [], 0
        last_slot, last_ring = limits.n_state_slots - 1, limits.n_state_rings - 1
        for n in n_rows:
            position = ints.number(0, _INT32 // 2)
            source, n_read = ints.number(NO_SLOT, last_slot), ints.number(0, position)
            source_ring, target = ints.number(NO_SLOT, last_ring), ints.number(0, last_slot)
            n_written, target_ring = ints.number(position, position + n), ints.number(NO_SLOT, last_ring)
            for n_pending, ring in (
                (position - n_read, source_ring),
                (position + n - n_written, target_ring),
            ):
                if n_pending > limits.n_pending or (n_pending and ring == NO_SLOT):
                    raise ProtocolError(f"{n_pending} tokens in ring {ring} of a state")
            read, written = (source, n_read, source_ring), (target, n_written, target_ring)
            spans.append(StateSpan(first_row, n, position, *read, *written))
            first_row += n
        return StateBatch(tuple(spans))


def _add_trees(tables: Sequence[SequenceTable], numbers: list[int]) -> None:
    trees = [(index, table.seen) for index, table in enumerate(tables) if table.seen is not None]
    numbers.append(len(trees))
    for index, seen in trees:
        numbers += [index, *seen.view(np.int32).tolist()]


def _n_same(latest: bytes, blocks: bytes) -> int:
    """How many blocks a table begins with that the latest one has, too. Both as bytes of int32."""
    if blocks.startswith(latest):
        return len(latest) // 4
    n = min(len(latest), len(blocks)) // 4
    differs = np.flatnonzero(np.frombuffer(latest, np.int32, n) != np.frombuffer(blocks, np.int32, n))
    return int(differs[0]) if len(differs) else n


class _LatestTables:
    """The block tables of the latest message, by group and by place in the batch."""

    def __init__(self) -> None:
        self._tables: dict[int, list[IntArray]] = {}

    def first(self, group: int, index: int, n_blocks: int) -> IntArray:
        if n_blocks == 0:
            return np.empty(0, np.int32)
        latest = self._tables.get(group, ())
        if index >= len(latest) or n_blocks > len(latest[index]):
            raise ProtocolError("a block table refers to one that was not sent")
        return latest[index][:n_blocks]

    def keep(self, group: int, tables: list[IntArray]) -> None:
        self._tables[group] = tables


def shifts_message(shifts: Sequence[BlockShift]) -> bytes:
    numbers = [len(shifts)]
    for shift in shifts:
        numbers += [shift.group, *_copies(shift.copies), len(shift.sources), shift.distance]
        numbers += [*shift.sources, *shift.targets]
    return _packed(numbers)


def emptied_message(emptied: Sequence[Sequence[int]]) -> bytes:
    return _packed([n for blocks in emptied for n in (len(blocks), *blocks)])


def layer_slots_message(layer: int, slots: torch.Tensor) -> bytes:
    assert 0 < len(slots) <= MAX_SLOTS
    return _packed([layer, len(slots), *slots.tolist()])


class _Ints:
    """Reads int32 numbers; each within its limits."""

    def __init__(self, payload: bytes) -> None:
        if len(payload) % 4:
            raise ProtocolError(f"{len(payload)} bytes are no whole number of int32")
        self._numbers = np.frombuffer(payload, np.int32)
        self._single = memoryview(payload).cast("i")
        self._position = 0

    def number(self, low: int, high: int) -> int:
        if self._position >= len(self._single):
            raise ProtocolError("a message ends too early")
        found = self._single[self._position]
        self._position += 1
        if not low <= found <= high:
            raise ProtocolError(f"a number outside of {low} to {high}")
        return found

    def array(self, n: int, low: int, high: int) -> IntArray:
        if n > len(self._numbers) - self._position:
            raise ProtocolError("a message ends too early")
        found = self._numbers[self._position : self._position + n]
        self._position += n
        if n and not (low <= found.min() and found.max() <= high):
            raise ProtocolError(f"a number outside of {low} to {high}")
        return found

    def require_end(self) -> None:
        if self._position != len(self._numbers):
            raise ProtocolError("a message has numbers after its end")


def _copies(copies: Sequence[BlockCopy]) -> list[int]:
    return [len(copies), *(n for c in copies for n in (c.group, c.src, c.dst, c.n_tokens))]


def _packed(numbers: Sequence[int]) -> bytes:
    return array("i", numbers).tobytes()
