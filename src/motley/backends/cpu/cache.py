"""The KV cache as kernels see it: addresses of planes, and where a batch reads and writes."""

from __future__ import annotations

from typing import Any

import torch

from motley.backends.cpu.native import CACHE_TYPES, address, core
from motley.backends.paged import Batch, StateBatch, Store


def store_view(store: Store, rows: slice) -> tuple[int, int, int, int, int, int, int]:
    """The store as csrc's CacheStoreView."""
    planes = store.planes
    codes = planes["codes"] if "codes" in planes else planes["values"]
    return (
        CACHE_TYPES[store.kind.name],
        address(codes),
        address(planes.get("high_bits")),
        address(planes.get("scale")),
        address(planes.get("minimum")),
        codes.shape[1],
        rows.start,
    )


def state_view(states: torch.Tensor, rings: torch.Tensor) -> tuple[int, bool, int, int]:
    """The state planes as csrc's StateStore."""
    return address(states), states.dtype == torch.bfloat16, address(rings), rings.shape[1]


class StateSlot:
    """A fixed place that programs read a batch's states from; filled before each run."""

    def __init__(self) -> None:
        self.native: Any = core.StateBatch()
        self._kept: Any = None  # what the address is of

    def fill(self, batch: StateBatch) -> None:
        self._kept = table = batch.table
        self.native.set(table.__array_interface__["data"][0], len(table))


class BatchSlot:
    """A fixed place that programs read a batch's block tables from; filled before each run."""

    def __init__(self, block_size: int) -> None:
        self.native: Any = core.Batch()
        self._block_size = block_size

    def fill(self, batch: Batch) -> None:
        tables = [(t.first_row, t.n_rows, t.position, t.first, t.blocks) for t in batch.tables]
        self.native.place(self._block_size, tables)
        for index, table in enumerate(batch.tables):
            if table.seen is not None:
                self.native.set_tree(index, table.seen.tolist())
