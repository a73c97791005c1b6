"""From the manager's block tables to what arenas read and write for one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from motley.kvcache.arena import CacheBatch, GroupBatch, IntArray, SequenceTable
from motley.kvcache.manager import CacheManager
from motley.kvcache.state_arena import StateBatch, StateSpan
from motley.kvcache.states import StateGroup


class Extent(NamedTuple):
    """A sequence's part of a batch: rows first_row … first_row + n - 1 are its positions start … start + n - 1.

    If they are a tree, `seen` has the bits of the rows that each row sees, its ancestors and itself.
    """

    sequence: int
    start: int
    n_tokens: int
    seen: tuple[int, ...] = ()  # empty: each row sees all before it


def group_batches(
    manager: CacheManager, extents: Sequence[Extent], *, n_ahead: int = 0, as_arrays: bool = True
) -> list[CacheBatch]:
    """One batch for each group; all slots have been reserved. `n_ahead`: tokens after the batch that tables reach.
    `as_arrays`: block ids and slots are numpy's and torch's, made at once.
    """
    return [
        _state_batch(manager, number, extents)
        if isinstance(group, StateGroup)
        else _group_batch(manager, number, extents, n_ahead, as_arrays)
        for number, group in enumerate(manager.groups)
    ]


def _state_batch(manager: CacheManager, group: int, extents: Sequence[Extent]) -> StateBatch:
    tables = manager.states([e.sequence for e in extents], group)
    spans: list[StateSpan] = []
    first_row = 0
    for (_, start, n_tokens, seen), table in zip(extents, tables, strict=True):
        assert not seen, "a recurrent state has one past"
        assert start <= table.next_folded <= start + n_tokens, "the state was reserved for another batch"
        spans.append(
            StateSpan(
                first_row,
                n_tokens,
                start,
                table.slot,
                table.n_folded,
                table.ring,
                table.next_slot,
                table.next_folded,
                table.next_ring,
            )
        )
        first_row += n_tokens
    return StateBatch(tuple(spans))


def _group_batch(
    manager: CacheManager, group: int, extents: Sequence[Extent], n_ahead: int, as_arrays: bool
) -> GroupBatch:
    size = manager.block_size
    views = manager.tables([e.sequence for e in extents], group)
    tables: list[SequenceTable] = []
    first_row = 0
    for (_, start, n_tokens, seen), view in zip(extents, views, strict=True):
        end = start + n_tokens + n_ahead
        # Of a copy, which slicing makes: the manager's array cannot grow while a view of it exists.
        copied = view.blocks[view.n_holes : -(-end // size)]
        # Native programs read any buffer of int32.
        blocks = np.frombuffer(copied, dtype=np.int32) if as_arrays else cast(IntArray, copied)
        masks = np.array(seen, np.uint64) if seen else None
        tables.append(SequenceTable(first_row, n_tokens, start, view.n_holes * size, blocks, masks))
        first_row += n_tokens
    return GroupBatch.of(tables, size, at_once=as_arrays)
