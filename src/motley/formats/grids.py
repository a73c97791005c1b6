"""Grids: the whole numbers that a code can stand for, before they are scaled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Grid(Protocol):
    """Codes and the numbers they stand for. `nearest` expects finite input and clamps it to the grid."""

    @property
    def lowest(self) -> int: ...

    @property
    def highest(self) -> int: ...

    def nearest(self, x: Tensor) -> Tensor:
        """The code whose level is nearest to each x (float32)."""
        ...

    def levels(self, codes: Tensor) -> Tensor:
        """The level of each code, as float32."""
        ...


@dataclass(frozen=True)
class UniformGrid:
    """Unsigned codes 0, 1, 2 ... stand for lowest, lowest + 1, ... highest. Ties round up."""

    lowest: int
    highest: int

    def nearest(self, x: Tensor) -> Tensor:
        # One addition: a second rounding would differ from other implementations near ties.
        return (x + (0.5 - self.lowest)).floor_().clamp_(0, self.highest - self.lowest).to(torch.uint8)

    def levels(self, codes: Tensor) -> Tensor:
        return codes.float() + self.lowest


@dataclass(frozen=True)
class SignedGrid:
    """A signed code is its own level. Ties round away from zero."""

    lowest: int
    highest: int

    def nearest(self, x: Tensor) -> Tensor:
        size = x.abs()
        whole = size.floor()
        # Not floor(size + 0.5): that addition rounds 0.49999997 up to 1.
        whole += size - whole >= 0.5
        return whole.copysign_(x).clamp_(self.lowest, self.highest).to(torch.int8)

    def levels(self, codes: Tensor) -> Tensor:
        return codes.float()


@dataclass(frozen=True)
class CodebookGrid:
    """Unsigned codes index an ascending table of levels."""

    table: tuple[int, ...]

    @property
    def lowest(self) -> int:
        return self.table[0]

    @property
    def highest(self) -> int:
        return self.table[-1]

    def nearest(self, x: Tensor) -> Tensor:
        table = torch.tensor(self.table, dtype=torch.float32, device=x.device)
        midpoints = (table[1:] + table[:-1]) / 2
        return torch.bucketize(x, midpoints, right=True).to(torch.uint8)

    def levels(self, codes: Tensor) -> Tensor:
        table = torch.tensor(self.table, dtype=torch.float32, device=codes.device)
        return table[codes.int()]
