"""Weights as the kernels read them: rows side by side, same bytes (csrc/kernels/formats.hpp), or as they lie in the
file (csrc/kernels/rows.hpp).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from motley.backends.base import LoadedWeight
from motley.backends.cpu.native import FORMATS, GROUP_ROWS, ROW_FORMATS, address
from motley.backends.cpu.slabs import Slabs
from motley.formats import Format, PackedTensor, get_format


def can_repack(weight: PackedTensor) -> bool:
    """Whether it is a matrix of a known format whose rows are whole 4-byte words; or such matrices of experts, each of
    whole groups of rows.
    """
    is_whole = weight.format.block_size > 1 or weight.data.shape[-1] % 4 == 0
    is_known = weight.format.name in FORMATS and is_whole
    shape = weight.data.shape
    return is_known and (len(shape) == 2 or (len(shape) == 3 and shape[1] % GROUP_ROWS == 0))


def narrowed(weight: PackedTensor) -> PackedTensor:
    """A matrix of F32 whose values are all bf16 values as BF16: the same numbers in half the bytes.

    Files store routers as F32, also those of models that were trained in bf16.
    """
    if weight.format.name != "F32" or weight.data.dim() != 2 or weight.shape[1] % 2 or not weight.nbytes:
        return weight
    halves = (
        weight.data.contiguous().view(torch.int16).view(*weight.shape, 2)
    )  # the low half of each value first
    if halves[..., 0].any():
        return weight
    return PackedTensor(halves[..., 1].contiguous().view(torch.uint8), get_format("BF16"))


def can_map(weight: PackedTensor) -> bool:
    """Whether kernels can read it in the file's layout."""
    is_known = weight.format.name in ROW_FORMATS and weight.data.dim() == 2
    return is_known and weight.data.is_contiguous() and weight.data.shape[0] % GROUP_ROWS == 0


class MappedTensor(PackedTensor):
    """A matrix in the file's layout, or a part of one: nothing is copied."""


@dataclass(frozen=True, eq=False)
class RepackedTensor:
    """A matrix for the native kernels, or matrices of experts one behind the other; other kernels read it through
    `unpack` and `rows`.
    """

    data: torch.Tensor  # uint8 (groups, bytes of a group)
    format: Format
    shape: tuple[int, ...]
    pool: Any

    @staticmethod
    def of(weight: PackedTensor, pool: Any, slabs: Slabs) -> RepackedTensor:
        source = weight.data.contiguous()
        n_columns, row_bytes = weight.shape[-1], source.shape[-1]
        n_rows = math.prod(weight.shape[:-1])
        n_groups, group_bytes = -(-n_rows // GROUP_ROWS), row_bytes * GROUP_ROWS
        data = slabs.take(n_groups * group_bytes).view(n_groups, group_bytes)
        pool.repack(address(source), address(data), FORMATS[weight.format.name], n_rows, n_columns, row_bytes)
        return RepackedTensor(data, weight.format, weight.shape, pool)

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    @property
    def expert_bytes(self) -> int:
        """The bytes from one expert's matrix to the next."""
        return self.data.numel() // max(self.shape[0], 1)

    def unpack(self) -> torch.Tensor:
        values = torch.empty(self.shape)
        n_rows, form = math.prod(self.shape[:-1]), FORMATS[self.format.name]
        self.pool.unpack(address(self.data), address(values), form, n_rows, self.shape[-1])
        return values

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return self.unpack()[index]


CpuWeight = PackedTensor | RepackedTensor


def own_weights(weights: Mapping[str, LoadedWeight]) -> dict[str, CpuWeight]:
    """The same, which this backend has loaded, or which are still as in the file."""
    assert all(isinstance(weight, CpuWeight) for weight in weights.values())
    return {name: weight for name, weight in weights.items() if isinstance(weight, CpuWeight)}
