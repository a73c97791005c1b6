"""Grids: the whole numbers (levels) that codes represent, before scaling."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor


class Grid(Protocol):
    """Codes (uint8) and their levels. Values outside of the grid are clamped to its ends."""

    @property
    def lowest(self) -> int: ...

    @property
    def highest(self) -> int: ...

    @property
    def spacing(self) -> float:
        """The mean distance of neighbouring levels."""
        ...

    def nearest(self, x: Tensor) -> Tensor:
        """The code whose level is nearest to each x (finite float32)."""
        ...

    def levels(self, codes: Tensor) -> Tensor:
        """The level of each code, as float32."""
        ...

    def snap(self, x: Tensor) -> Tensor:
        """The level nearest to each x. Ties may differ from `nearest`. Faster, and may overwrite x."""
        ...


@dataclass(frozen=True)
class UniformGrid:
    """Codes 0, 1, 2 ... are the levels lowest, lowest + 1, ... highest. Ties round up."""

    lowest: int
    highest: int
    spacing: float = 1.0

    def nearest(self, x: Tensor) -> Tensor:
        # One addition: a second rounding would differ from other implementations near ties.
        return (x + (0.5 - self.lowest)).floor_().clamp_(0, self.highest - self.lowest).to(torch.uint8)

    def levels(self, codes: Tensor) -> Tensor:
        return codes.float().add_(self.lowest)

    def snap(self, x: Tensor) -> Tensor:
        return x.round_().clamp_(self.lowest, self.highest)


@dataclass(frozen=True)
class SignedGrid:
    """A code is the byte of a signed level (`codes.view(torch.int8)`). Ties round away from zero."""

    lowest: int
    highest: int
    spacing: float = 1.0

    def nearest(self, x: Tensor) -> Tensor:
        size = x.abs()
        whole = size.floor()
        # Not floor(size + 0.5): that addition rounds 0.49999997 up to 1.
        whole += size - whole >= 0.5
        return whole.copysign_(x).clamp_(self.lowest, self.highest).to(torch.int8).view(torch.uint8)

    def levels(self, codes: Tensor) -> Tensor:
        return codes.view(torch.int8).float()

    def snap(self, x: Tensor) -> Tensor:
        return x.round_().clamp_(self.lowest, self.highest)


@dataclass(frozen=True)
class CodebookGrid:
    """Codes index an ascending table of levels. Ties round up."""

    table: tuple[int, ...]

    @property
    def lowest(self) -> int:
        return self.table[0]

    @property
    def highest(self) -> int:
        return self.table[-1]

    @property
    def spacing(self) -> float:
        return (self.highest - self.lowest) / (len(self.table) - 1)

    def nearest(self, x: Tensor) -> Tensor:
        return _nearest_codes(self.table, x.device)[self._half_steps(x)]

    def levels(self, codes: Tensor) -> Tensor:
        return _table(self.table, codes.device)[codes.int()]

    def snap(self, x: Tensor) -> Tensor:
        return self.levels(self.nearest(x))

    def _half_steps(self, x: Tensor) -> Tensor:
        """The number of the half step that contains x. Every midpoint between levels is a border of two half steps."""
        n_steps = 2 * (self.highest - self.lowest)
        return (x - self.lowest).mul_(2).floor_().clamp_(0, n_steps).int()


@lru_cache
def _table(table: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(table, dtype=torch.float32, device=device)


@lru_cache
def _nearest_codes(table: tuple[int, ...], device: torch.device) -> Tensor:
    """The nearest code for every half step from the lowest level to the highest."""
    levels = _table(table, device)
    midpoints = (levels[1:] + levels[:-1]) / 2
    steps = torch.arange(2 * table[0], 2 * table[-1] + 1, device=device) / 2
    return torch.bucketize(steps, midpoints, right=True).to(torch.uint8)


# The 16 levels of IQ4_NL and IQ4_XS, denser near zero where weights are (a constant of the GGUF format).
IQ4_GRID = CodebookGrid((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
