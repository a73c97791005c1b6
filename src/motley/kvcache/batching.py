"""From the manager's block tables to what arenas read and write for one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from motley.kvcache.arena import GroupBatch, SequenceTable
from motley.kvcache.manager import CacheManager


class Extent(NamedTuple):
    """A sequence's part of a batch: rows first_row … first_row + n - 1 are its positions start … start + n - 1."""

    sequence: int
    start: int
    n_tokens: int


def group_batches(manager: CacheManager, extents: Sequence[Extent]) -> list[GroupBatch]:
    """One GroupBatch for each group; all slots have been reserved."""
    return [_group_batch(manager, group, extents) for group in range(len(manager.groups))]


def _group_batch(manager: CacheManager, group: int, extents: Sequence[Extent]) -> GroupBatch:
    size = manager.block_size
    views = manager.tables([e.sequence for e in extents], group)
    tables, new_slots, first_row = [], [], 0
    for extent, view in zip(extents, views, strict=True):
        end = extent.start + extent.n_tokens
        blocks = torch.tensor(view.blocks[: -(-end // size)], dtype=torch.int64)
        n_holes = int((blocks < 0).sum())
        slots = (blocks[n_holes:, None] * size + torch.arange(size)).flatten()[: end - n_holes * size]
        positions = torch.arange(extent.start, end)
        rows = torch.arange(first_row, first_row + extent.n_tokens)
        tables.append(SequenceTable(rows, positions, n_holes * size, slots))
        new_slots.append(slots[len(slots) - extent.n_tokens :])
        first_row += extent.n_tokens
    return GroupBatch(torch.cat(new_slots), tuple(tables))
