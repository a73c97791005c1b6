"""What the executable reads of a cache layer, and where a batch's rows find their context, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from motley.backends.cuda.kernels.attention import Tables
from motley.backends.cuda.kernels.tiles import CachePlanes
from motley.backends.paged import Batch, Store, Table


def cache_planes(store: Store) -> CachePlanes:
    return CachePlanes.of(store.kind.name, store.planes)


@dataclass(frozen=True, eq=False)
class Place:
    """Where one batch writes and reads in one group of layers."""

    slots: torch.Tensor  # int32 (tokens,)
    tables: Tables  # of sequences with a single row; rows are theirs, in order
    single_rows: torch.Tensor  # int64: which rows of the batch these are
    chunks: tuple[Table, ...]  # sequences with several rows
    chunk_blocks: tuple[torch.Tensor, ...]  # int32: of each of them, on the device

    @property
    def is_decode(self) -> bool:
        return not self.chunks

    @staticmethod
    def of(batch: Batch, n_table_blocks: int, device: torch.device) -> Place:
        """`n_table_blocks`: the width of the table, the same for all batches that share a captured graph."""
        singles = [table for table in batch.tables if table.n_rows == 1]
        blocks = torch.zeros(len(singles), n_table_blocks, dtype=torch.int32)
        for i, table in enumerate(singles):
            blocks[i, : len(table.blocks)] = torch.from_numpy(table.blocks)
        tables = Tables(
            blocks.to(device),
            torch.tensor([table.first for table in singles], dtype=torch.int32, device=device),
            torch.arange(len(singles), dtype=torch.int32, device=device),
            torch.tensor([table.position for table in singles], dtype=torch.int32, device=device),
        )
        rows = torch.tensor([table.first_row for table in singles], dtype=torch.int64, device=device)
        chunks = tuple(table for table in batch.tables if table.n_rows > 1)
        chunk_blocks = tuple(torch.from_numpy(chunk.blocks).to(device) for chunk in chunks)
        return Place(batch.slots.to(device, torch.int32), tables, rows, chunks, chunk_blocks)

    def copy_from(self, other: Place) -> None:
        """Take another batch's data into the same memory; both have as many rows, of single-row sequences."""
        for mine, new in (
            (self.slots, other.slots),
            (self.tables.blocks, other.tables.blocks),
            (self.tables.firsts, other.tables.firsts),
            (self.tables.row_position, other.tables.row_position),
            (self.single_rows, other.single_rows),
        ):
            mine.copy_(new)
