"""A block's layout as a list of fields, read into planes (named tensors) and written back.

Codes are uint8. A field may hold only some bits of a plane's codes; the bits from several fields are combined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from motley.formats.bits import join_bits, split_bits

_HALF_BYTES = 2


class Field(Protocol):
    """Bytes of a block with a common layout."""

    @property
    def n_bytes(self) -> int: ...

    def read(self, data: Tensor) -> Mapping[str, Tensor]:
        """Bytes (blocks, n_bytes) -> planes (blocks, ...)."""
        ...

    def write(self, planes: Mapping[str, Tensor]) -> Tensor:
        """Planes -> bytes."""
        ...


@dataclass(frozen=True)
class Half:
    """One float16."""

    plane: str
    n_bytes: ClassVar[int] = _HALF_BYTES

    def read(self, data: Tensor) -> Mapping[str, Tensor]:
        return {self.plane: data.contiguous().view(torch.float16)}

    def write(self, planes: Mapping[str, Tensor]) -> Tensor:
        return planes[self.plane].contiguous().view(torch.uint8)


@dataclass(frozen=True)
class Bits:
    """Bits `first` to `first + bits` of every code of a plane, arranged as in `bits`."""

    plane: str
    n_bytes: int
    bits: int
    width: int
    first: int = 0

    def read(self, data: Tensor) -> Mapping[str, Tensor]:
        return {self.plane: split_bits(data, self.bits, self.width) << self.first}

    def write(self, planes: Mapping[str, Tensor]) -> Tensor:
        return join_bits(planes[self.plane] >> self.first & (1 << self.bits) - 1, self.bits, self.width)


@dataclass(frozen=True)
class NibblePairs:
    """Two planes of 4-bit codes, one in the low and one in the high half of each byte."""

    low: str
    high: str
    n_bytes: int

    def read(self, data: Tensor) -> Mapping[str, Tensor]:
        return {self.low: data & 0x0F, self.high: data >> 4}

    def write(self, planes: Mapping[str, Tensor]) -> Tensor:
        return planes[self.low] | planes[self.high] << 4


@dataclass(frozen=True)
class SixBitPairs:
    """Two planes a and b of eight 6-bit codes, in twelve bytes.

    byte 0-3    a[0-3] in the low six bits, above them the upper two bits of a[4-7]
    byte 4-7    the same of b
    byte 8-11   the lower four bits of a[4-7] in the low half, of b[4-7] in the high half
    """

    a: str
    b: str
    n_bytes: ClassVar[int] = 12

    def read(self, data: Tensor) -> Mapping[str, Tensor]:
        a, b, rest = data.chunk(3, -1)
        return {
            self.a: torch.cat([a & 0x3F, rest & 0x0F | a >> 6 << 4], -1),
            self.b: torch.cat([b & 0x3F, rest >> 4 | b >> 6 << 4], -1),
        }

    def write(self, planes: Mapping[str, Tensor]) -> Tensor:
        a, upper_a = planes[self.a].chunk(2, -1)
        b, upper_b = planes[self.b].chunk(2, -1)
        rest = upper_a & 0x0F | upper_b << 4
        return torch.cat([a | upper_a >> 4 << 6, b | upper_b >> 4 << 6, rest], -1)


@dataclass(frozen=True)
class Layout:
    """The fields of a block, in order."""

    fields: tuple[Field, ...]

    @property
    def block_bytes(self) -> int:
        return sum(field.n_bytes for field in self.fields)

    def read(self, data: Tensor) -> dict[str, Tensor]:
        """Blocks (blocks, block_bytes) uint8 -> planes."""
        planes: dict[str, Tensor] = {}
        pieces = torch.split(data, [field.n_bytes for field in self.fields], -1)
        for field, piece in zip(self.fields, pieces, strict=True):
            for name, plane in field.read(piece).items():
                planes[name] = planes[name] | plane if name in planes else plane
        return planes

    def write(self, planes: Mapping[str, Tensor]) -> Tensor:
        """Planes -> blocks (blocks, block_bytes) uint8."""
        return torch.cat([field.write(planes) for field in self.fields], -1)
