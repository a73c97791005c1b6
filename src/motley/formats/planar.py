"""Quantizers over blocks of 32 values, in planes: codes apart from scales apart from minima.

    value = scale * level(code)               Q4_0, Q5_0, Q8_0, IQ4_NL
    value = scale * level(code) + minimum     Q4_1, Q5_1

Planes are the primitive: a GGUF block is one arrangement of them (`block32`), the KV cache is another. The
rules are ggml's: on ordinary input the result is that of the `gguf` package, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from motley.formats.bits import to_half
from motley.formats.grids import CodebookGrid, Grid, SignedGrid, UniformGrid

BLOCK = 32  # values that share one scale

# Half of float32's range: max - min of two such values is still finite.
_LARGEST = 2.0**126

# The 16 levels of IQ4_NL and IQ4_XS, denser near zero where weights are (a constant of the GGUF format).
IQ4_GRID = CodebookGrid((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))


@dataclass(frozen=True)
class Planes:
    """Quantized values, one tensor per kind of number."""

    codes: Tensor  # (..., n) one code per value: uint8, or int8 for Q8_0
    scale: Tensor  # (..., n / 32) float16
    minimum: Tensor | None = None  # (..., n / 32) float16


# Blocks (..., 32) -> scale (..., 1) and minimum (..., 1) or None, both float32.
Fit = Callable[[Tensor, Grid], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Quantizer:
    """Values <-> planes. A block with a NaN or an infinity becomes NaN as a whole: damage shows."""

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
        codes = self.grid.nearest((blocks if minimum is None else blocks - minimum) * _reciprocal(scale))
        if self.refits:
            scale = _least_squares_scale(blocks, self.grid.levels(codes))
        scale = torch.where(is_finite, to_half(scale), torch.nan)
        return Planes(
            codes.flatten(-2), scale.squeeze(-1), None if minimum is None else to_half(minimum).squeeze(-1)
        )

    def dequantize(self, planes: Planes) -> Tensor:
        """Planes -> (..., n) float32."""
        levels = torch.unflatten(self.grid.levels(planes.codes), -1, (-1, BLOCK))
        values = levels * planes.scale.float().unsqueeze(-1)
        if planes.minimum is not None:
            values += planes.minimum.float().unsqueeze(-1)
        return values.flatten(-2)


def _reciprocal(scale: Tensor) -> Tensor:
    """1 / scale, and 0 where that is not finite: such a scale is zero in float16."""
    inverse = 1 / scale
    return torch.where(inverse.isfinite(), inverse, 0.0)


def _least_squares_scale(blocks: Tensor, levels: Tensor) -> Tensor:
    energy = levels.square().sum(-1, keepdim=True)
    return torch.where(energy > 0, (blocks * levels).sum(-1, keepdim=True) / energy, 0.0)


def _fit_extreme(blocks: Tensor, grid: Grid) -> tuple[Tensor, None]:
    """The value farthest from zero, whatever its sign, falls on the lowest level: the grid's far end."""
    farthest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    return farthest / grid.lowest, None


def _fit_magnitude(blocks: Tensor, grid: Grid) -> tuple[Tensor, None]:
    """A symmetric grid that just reaches the largest magnitude."""
    return blocks.abs().amax(-1, keepdim=True) / grid.highest, None


def _fit_range(blocks: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The grid spans exactly the range of the block."""
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
