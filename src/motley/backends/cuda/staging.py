"""A batch's numbers on the device: ids, positions, slots and block tables in one range, brought there by one copy.

    tokens │ positions │ output rows │ of each group of layers: slots, positions, tables, rows │ the tables

A table is the position that it starts with and its block ids; a row holds the number at which its table begins. The
tables come last, so that only as much is copied as is used.

A plan may have more rows than the batch (see `CudaBackend.bucket`). What pads it is inert: such a row has slot -1, so
that nothing of it is stored, and a position one block before its table begins, so that it reads no context. What is
computed for it reaches no other row, and is cut off at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from motley.backends.cuda.kernels.attention import Tables
from motley.backends.paged import Batch, Table

_ALIGNMENT = 4  # numbers: parts begin at 16 bytes, so that kernels are compiled for one case
_SPARE = 1024  # numbers for tables to begin with


@dataclass(frozen=True, eq=False)
class Place:
    """Where one batch writes and reads in one group of layers. On the device, int32."""

    slots: torch.Tensor  # (rows,)
    tables: Tables  # of sequences with a single row; in a decode batch, all rows
    single_rows: torch.Tensor  # which rows of the batch these are
    chunks: tuple[Table, ...]  # sequences with several rows
    chunk_blocks: tuple[torch.Tensor, ...]  # block ids of each of them

    @property
    def is_decode(self) -> bool:
        return not self.chunks


@dataclass(frozen=True, eq=False)
class Staged:
    """A batch on the device. Valid until the next one is written."""

    values: Mapping[str, torch.Tensor]  # int32, by the input's name
    places: Mapping[int, Place]  # by id of the group's batch
    address: int  # of the memory; the next batch's is the same, unless tables have outgrown it

    @property
    def is_decode(self) -> bool:
        return all(place.is_decode for place in self.places.values())


class Staging:
    """The memory of one plan's batches, here and on the device."""

    def __init__(
        self, sizes: Mapping[str, int], n_groups: int, block_size: int, device: torch.device
    ) -> None:
        """`sizes`: numbers of each input, of the plan; the largest is its rows."""
        self._device = device
        self._block_size = block_size
        self._n_rows = max(sizes.values(), default=0)
        self._names: dict[str, slice] = {}
        self._groups: list[tuple[slice, ...]] = []
        start = 0
        for name, size in sizes.items():
            self._names[name] = slice(start, start + size)
            start = _aligned(start + size)
        for _ in range(n_groups):
            parts = []
            for _ in range(4):  # slots, positions, tables, rows
                parts.append(slice(start, start + self._n_rows))
                start = _aligned(start + self._n_rows)
            self._groups.append(tuple(parts))
        self._n_fixed = start
        self._copied: torch.cuda.Event | None = None
        self._allocate(start + _SPARE)

    def write(self, inputs: Mapping[str, torch.Tensor], batches: Sequence[Batch]) -> Staged:
        """Bring a batch to the device; `batches` are its groups', each once."""
        n_used = self._n_fixed + sum(len(t.blocks) + 1 for batch in batches for t in batch.tables)
        if n_used > len(self._here):
            self._allocate(2 * n_used)
        if self._copied is not None:
            self._copied.synchronize()  # the last batch has left
        numbers: npt.NDArray[np.int32] = self._here.numpy()
        for name, part in self._names.items():
            _fill(numbers[part], inputs[name].numpy(), 0)
        cursor, places = self._n_fixed, {}
        for batch, parts in zip(batches, self._groups, strict=True):
            places[id(batch)], cursor = self._place(numbers, batch, parts, cursor)
        self._there[:n_used].copy_(self._here[:n_used], non_blocking=True)
        if self._device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        values = {name: self._there[part] for name, part in self._names.items()}
        return Staged(values, places, self._there.data_ptr())

    def _place(
        self, numbers: npt.NDArray[np.int32], batch: Batch, parts: Sequence[slice], cursor: int
    ) -> tuple[Place, int]:
        """Write a group's part, its tables from `cursor` on; also gives where these end."""
        singles: list[tuple[int, int, int]] = []  # position, table, row
        chunks, chunk_blocks = [], []
        first_table = cursor
        for table in batch.tables:
            stop = cursor + 1 + len(table.blocks)
            numbers[cursor] = table.first
            numbers[cursor + 1 : stop] = table.blocks
            if table.n_rows == 1:
                singles.append((table.position, cursor, table.first_row))
            else:
                chunks.append(table)
                chunk_blocks.append(self._there[cursor + 1 : stop])
            cursor = stop
        slots, *columns = parts
        _fill(numbers[slots], batch.slots.numpy(), -1)
        inert = int(numbers[first_table]) - self._block_size, first_table, 0
        for part, values, pad in zip(columns, zip(*singles, strict=True), inert, strict=False):
            _fill(numbers[part], np.array(values, dtype=np.int32), pad)
        n_singles = len(singles) if chunks else self._n_rows
        positions, tables, rows = (self._there[part][:n_singles] for part in columns)
        everything = Tables(self._there[1:, None], self._there, tables, positions)
        place = Place(self._there[slots], everything, rows, tuple(chunks), tuple(chunk_blocks))
        return place, cursor

    def _allocate(self, n_numbers: int) -> None:
        is_gpu = self._device.type == "cuda"
        self._here = torch.zeros(n_numbers, dtype=torch.int32, pin_memory=is_gpu)
        self._there = torch.zeros(n_numbers, dtype=torch.int32, device=self._device)
        self._copied = None


def _fill(part: npt.NDArray[np.int32], values: npt.NDArray[np.int32], pad: int) -> None:
    part[: len(values)] = values
    part[len(values) :] = pad


def _aligned(n: int) -> int:
    return -(-n // _ALIGNMENT) * _ALIGNMENT
