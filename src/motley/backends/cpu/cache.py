"""The KV cache as kernels see it: addresses of planes, and where a batch reads and writes."""

from __future__ import annotations

from typing import Any

import numpy as np

from motley.backends.cpu.native import CACHE_KINDS, address, core
from motley.backends.paged import Batch, Store


def store_view(store: Store, rows: slice) -> tuple[int, int, int, int, int, int, int]:
    """As csrc's CacheStoreView."""
    planes = store.planes
    codes = planes["codes"] if "codes" in planes else planes["values"]
    return (
        CACHE_KINDS[store.kind.name],
        address(codes),
        address(planes.get("high_bits")),
        address(planes.get("scale")),
        address(planes.get("minimum")),
        codes.shape[1],
        rows.start,
    )


class BatchSlot:
    """A fixed place that programs read a batch's addresses from; filled before each run."""

    def __init__(self) -> None:
        self.native: Any = core.Batch()
        self._kept: list[Any] = []  # what the addresses are of

    def fill(self, batch: Batch, block_size: int) -> None:
        self._kept = [batch.slots]
        sequences = []
        for table in batch.tables:
            # in numpy, whose small operations take a tenth of torch's time
            blocks = (table.slots.numpy()[::block_size] // block_size).astype(np.int32)
            self._kept.append(blocks)
            first_row, position = table.rows.numpy()[0].item(), table.positions.numpy()[0].item()
            sequences.append((first_row, len(table.rows), position, table.first, blocks.ctypes.data))
        self.native.set(address(batch.slots), sequences)
