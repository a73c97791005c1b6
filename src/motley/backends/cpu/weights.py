"""Weights in the order that the kernels read: 16 rows side by side, same bytes (csrc/kernels/formats.hpp)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from motley.backends.cpu.native import FORMATS, GROUP_ROWS, address, core
from motley.formats import PackedTensor


_SLAB_BYTES = 256 << 20  # of addresses: memory is taken when it is first written
_ALIGNMENT = 64


class Slab:
    """Memory for weights, cut from large pieces on large pages: with small pages, the system would take longer to
    provide the memory than the threads to fill it.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, n_bytes: int) -> torch.Tensor:
        """Bytes of any value; their memory goes when nobody uses the piece any more that they were cut from."""
        n_taken = -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        if n_taken > self._rest.numel():
            self._rest = torch.empty(max(n_taken, _SLAB_BYTES), dtype=torch.uint8)
            core.want_huge_pages(address(self._rest), self._rest.numel())
        taken, self._rest = self._rest[:n_bytes], self._rest[n_taken:]
        return taken


def can_repack(weight: PackedTensor) -> bool:
    """Whether it is a matrix of a known format whose rows are whole 4-byte words."""
    is_whole = weight.format.block_size > 1 or weight.data.shape[-1] % 4 == 0
    return weight.format.name in FORMATS and weight.data.dim() == 2 and is_whole


@dataclass(frozen=True, eq=False)
class RepackedTensor(PackedTensor):
    """A matrix for the native kernels; the others read it through `unpack`. `data` is (groups, bytes of a group)."""

    n_rows: int
    n_columns: int
    pool: Any

    @staticmethod
    def of(weight: PackedTensor, pool: Any, memory: Slab) -> RepackedTensor:
        n_rows, n_columns = weight.shape
        source = weight.data.contiguous()
        row_bytes = source.shape[1]
        n_groups, group_bytes = -(-n_rows // GROUP_ROWS), row_bytes * GROUP_ROWS
        data = memory.take(n_groups * group_bytes).view(n_groups, group_bytes)
        pool.repack(address(source), address(data), FORMATS[weight.format.name], n_rows, n_columns, row_bytes)
        return RepackedTensor(data, weight.format, n_rows, n_columns, pool)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.n_rows, self.n_columns

    def unpack(self) -> torch.Tensor:
        values = torch.empty(self.shape)
        form = FORMATS[self.format.name]
        self.pool.unpack(address(self.data), address(values), form, self.n_rows, self.n_columns)
        return values

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return self.unpack()[index]

    def slice_rows(self, start: int, stop: int) -> PackedTensor:
        raise AssertionError("weights are cut before they are repacked")
