"""Quantizers over blocks of 32 values, as separate planes of codes, scales and minima.

    value = scale * level(code)               Q4_0, Q5_0, Q8_0, IQ4_NL
    value = scale * level(code) + minimum     Q4_1, Q5_1

A GGUF block is one arrangement of the planes (`block32`), the KV cache is another. The rules are ggml's: for
finite input of ordinary size the result equals that of the `gguf` package, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from motley.formats.grids import IQ4_GRID, Grid, SignedGrid, UniformGrid
from motley.formats.numeric import farthest_from_zero, least_squares_scale, reciprocal, to_half

BLOCK = 32  # values that share one scale

# No larger value can be stored: 127 times the largest float16 is less. Sums of such values stay finite.
_LARGEST = 2.0**23


@dataclass(frozen=True, eq=False)
class Planes:
    """Quantized values, one tensor per kind of number."""

    codes: Tensor  # (..., n) uint8; those of Q8_0 are signed bytes
    scale: Tensor  # (..., n / 32) float16
    minimum: Tensor | None = None  # (..., n / 32) float16


# Blocks (..., 32) -> scale (..., 1) and minimum (..., 1) or None, both float32.
Fit = Callable[[Tensor, Grid], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Quantizer:
    """Values <-> planes. A block with a NaN or an infinity becomes NaN as a whole, so that errors are visible."""

    name: str
    bits: int  # per code
    grid: Grid
    fit: Fit
    has_minimum: bool = False
    refits: bool = False  # whether the scale is fitted again, by least squares, once the codes are known

    def quantize(self, values: Tensor) -> Planes:
        """(..., n) float -> planes; n is a multiple of 32."""
        blocks = torch.unflatten(values.float(), -1, (-1, BLOCK))
        is_finite = blocks.isfinite().all(-1, keepdim=True)
        blocks = torch.where(is_finite, blocks, 0.0).clamp_(-_LARGEST, _LARGEST)
        scale, minimum = self.fit(blocks, self.grid)
        codes = self.grid.nearest((blocks if minimum is None else blocks - minimum) * reciprocal(scale))
        if self.refits:
            scale = least_squares_scale(blocks, self.grid.levels(codes))
        scale = torch.where(is_finite, to_half(scale), torch.nan)
        minimum = None if minimum is None else to_half(minimum).squeeze(-1)
        return Planes(codes.flatten(-2), scale.squeeze(-1), minimum)

    def dequantize(self, planes: Planes) -> Tensor:
        """Planes -> (..., n) float32."""
        levels = torch.unflatten(self.grid.levels(planes.codes), -1, (-1, BLOCK))
        values = levels * planes.scale.float().unsqueeze(-1)
        if planes.minimum is not None:
            values += planes.minimum.float().unsqueeze(-1)
        return values.flatten(-2)


def _fit_extreme(blocks: Tensor, grid: Grid) -> tuple[Tensor, None]:
    """The scale that puts the value farthest from zero, of either sign, on the lowest level, the end of the grid."""
    return farthest_from_zero(blocks) / grid.lowest, None


def _fit_magnitude(blocks: Tensor, grid: Grid) -> tuple[Tensor, None]:
    """The scale with which a symmetric grid ends at the largest magnitude."""
    return blocks.abs().amax(-1, keepdim=True) / grid.highest, None


def _fit_range(blocks: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The scale and minimum with which the grid spans exactly the block's range."""
    minimum, maximum = blocks.aminmax(dim=-1, keepdim=True)
    return (maximum - minimum) / grid.highest, minimum


QUANTIZERS: Mapping[str, Quantizer] = MappingProxyType(
    {
        q.name: q
        for q in (
            Quantizer("Q8_0", 8, SignedGrid(-127, 127), _fit_magnitude),
            Quantizer("Q5_1", 5, UniformGrid(0, 31), _fit_range, has_minimum=True),
            Quantizer("Q5_0", 5, UniformGrid(-16, 15), _fit_extreme),
            Quantizer("Q4_1", 4, UniformGrid(0, 15), _fit_range, has_minimum=True),
            Quantizer("Q4_0", 4, UniformGrid(-8, 7), _fit_extreme),
            Quantizer("IQ4_NL", 4, IQ4_GRID, _fit_extreme, refits=True),
        )
    }
)
