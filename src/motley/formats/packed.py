"""A format, and a tensor that stays packed in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from motley.errors import ModelError


@dataclass(frozen=True)
class Format:
    """How rows of float32 values become bytes. Rows are whole blocks; blocks are independent of each other."""

    name: str
    block_size: int  # values
    block_bytes: int
    # (blocks, block_bytes) uint8 -> (blocks, block_size) float32, and back
    unpack_blocks: Callable[[Tensor], Tensor] = field(repr=False)
    pack_blocks: Callable[[Tensor], Tensor] = field(repr=False)

    def row_bytes(self, n_values: int) -> int:
        """Bytes of a row of `n_values`."""
        blocks, rest = divmod(n_values, self.block_size)
        if rest:
            raise ModelError(
                f"a row of {n_values} values is not whole {self.name} blocks of {self.block_size} values",
                hint="use a format with smaller blocks, such as Q8_0 or F16",
            )
        return blocks * self.block_bytes

    def row_values(self, n_bytes: int) -> int:
        """Values in a row of `n_bytes`."""
        blocks, rest = divmod(n_bytes, self.block_bytes)
        if rest:
            raise ModelError(
                f"a row of {n_bytes} bytes is not whole {self.name} blocks of {self.block_bytes} bytes"
            )
        return blocks * self.block_size

    def unpack(self, data: Tensor) -> Tensor:
        """uint8 (..., row_bytes) -> float32 (..., n_values). F32 comes back as a view of `data`."""
        shape = (*data.shape[:-1], self.row_values(data.shape[-1]))
        if data.numel() == 0:
            return data.new_empty(shape, dtype=torch.float32)
        return self.unpack_blocks(data.reshape(-1, self.block_bytes)).view(shape)

    def pack(self, values: Tensor) -> Tensor:
        """float32 (..., n_values) -> uint8 (..., row_bytes)."""
        shape = (*values.shape[:-1], self.row_bytes(values.shape[-1]))
        if values.numel() == 0:
            return values.new_empty(shape, dtype=torch.uint8)
        return self.pack_blocks(values.float().reshape(-1, self.block_size)).view(shape)


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A tensor whose rows stay packed; `shape` is that of the unpacked tensor."""

    data: Tensor  # (*rows, row_bytes) uint8
    format: Format

    @classmethod
    def pack(cls, values: Tensor, fmt: Format) -> PackedTensor:
        return cls(fmt.pack(values), fmt)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], self.format.row_values(self.data.shape[-1]))

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    @property
    def device(self) -> torch.device:
        return self.data.device

    def unpack(self) -> Tensor:
        """All values, float32."""
        return self.format.unpack(self.data)

    def rows(self, index: Tensor) -> Tensor:
        """The values of rows of the first axis: index -> (*index.shape, *shape[1:])."""
        return self.format.unpack(self.data[index])

    def slice_rows(self, start: int, stop: int) -> PackedTensor:
        """A view of rows start..stop of the first axis."""
        return PackedTensor(self.data[start:stop], self.format)

    def to(self, device: torch.device | str) -> PackedTensor:
        return PackedTensor(self.data.to(device), self.format)
