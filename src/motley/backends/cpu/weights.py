"""Weights in the order that the kernels read: 16 rows side by side, same bytes (csrc/kernels/formats.hpp)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from motley.backends.cpu.native import FORMATS, GROUP_ROWS, address
from motley.formats import PackedTensor


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
    def of(weight: PackedTensor, pool: Any) -> RepackedTensor:
        n_rows, n_columns = weight.shape
        source = weight.data.contiguous()
        row_bytes = source.shape[1]
        # Pages are of the size that the system chooses. On large ones decoding is 1 % faster, but a virtual machine
        # that has handed its free memory back to the host gets them several times as slowly.
        data = torch.empty(-(-n_rows // GROUP_ROWS), row_bytes * GROUP_ROWS, dtype=torch.uint8)
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
