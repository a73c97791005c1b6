"""Quantizers over super-blocks of 256 values, whose sub-blocks have small whole numbers as scales.

    value = scale * scales[i] * level(code)                          Q3_K, Q6_K, IQ4_XS
    value = scale * scales[i] * level(code) - offset * offsets[i]    Q2_K, Q4_K, Q5_K

`scale` and `offset` are float16, one for the super-block; `scales[i]` and `offsets[i]` belong to sub-block i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

import torch
from torch import Tensor

from motley.formats.grids import IQ4_GRID, Grid, SignedGrid, UniformGrid
from motley.formats.numeric import farthest_from_zero, reciprocal, to_half
from motley.formats.search import Fit, best_fit, fit_scale, fit_scale_and_offset

SUPERBLOCK = 256  # values

# No larger value can be stored: the largest float16, 128 for a sub-block, 32 for a code. Squares stay finite.
_LARGEST = 2.0**28


@dataclass(frozen=True, eq=False)
class SuperPlanes:
    """Quantized super-blocks, one tensor for each kind of number."""

    codes: Tensor  # (blocks, 256) uint8
    scale: Tensor  # (blocks, 1) float16
    scales: Tensor  # (blocks, sub-blocks) uint8
    offset: Tensor | None = None  # (blocks, 1) float16
    offsets: Tensor | None = None  # (blocks, sub-blocks) uint8


@dataclass(frozen=True)
class SuperQuantizer:
    """Values <-> planes. A super-block with a NaN or an infinity becomes NaN as a whole, so that errors are visible."""

    name: str
    grid: Grid  # of the values
    sub_size: int  # values in a sub-block
    scale_grid: Grid  # of the scales and offsets of sub-blocks
    has_offset: bool = False

    def dequantize(self, planes: SuperPlanes) -> Tensor:
        """Planes -> (blocks, 256) float32."""
        scale = planes.scale.float() * self.scale_grid.levels(planes.scales)  # (blocks, sub-blocks)
        levels = torch.unflatten(self.grid.levels(planes.codes), -1, (-1, self.sub_size))
        values = levels.mul_(scale.unsqueeze(-1))
        if planes.offset is not None and planes.offsets is not None:
            values -= (planes.offset.float() * self.scale_grid.levels(planes.offsets)).unsqueeze(-1)
        return values.flatten(-2)

    def quantize(self, blocks: Tensor) -> SuperPlanes:
        """(blocks, 256) float32 -> planes."""
        is_finite = blocks.isfinite().all(-1, keepdim=True)
        blocks = torch.where(is_finite, blocks, 0.0).clamp_(-_LARGEST, _LARGEST)
        values = torch.unflatten(blocks, -1, (-1, self.sub_size))
        ideal = fit_scale_and_offset(values, self.grid) if self.has_offset else fit_scale(values, self.grid)
        scale, offset = (to_half(self._unit(part)) for part in ideal)  # (blocks, 1)
        units = scale.float().unsqueeze(-1), offset.float().unsqueeze(-1)
        rounded = self._round(values, ideal, units)  # (blocks, sub-blocks, 1)
        codes = self.grid.nearest((values + rounded[1]) * reciprocal(rounded[0])).flatten(-2)
        scale = torch.where(is_finite, scale, torch.nan)
        scales = self._whole_codes(rounded[0], units[0])
        if not self.has_offset:
            return SuperPlanes(codes, scale, scales)
        return SuperPlanes(codes, scale, scales, offset, self._whole_codes(rounded[1], units[1]))

    def _unit(self, part: Tensor) -> Tensor:
        """The unit that puts the sub-block's scale farthest from zero on the end of the scale grid."""
        lowest, highest = self.scale_grid.lowest, self.scale_grid.highest
        return farthest_from_zero(part.squeeze(-1)) / (lowest if lowest < 0 else highest)

    def _round(self, values: Tensor, ideal: Fit, units: Fit) -> Fit:
        """Scales and offsets in whole units: the best of those nearest to the ideal and their neighbours."""
        scales = self._whole(ideal[0], units[0])
        offsets = self._whole(ideal[1], units[1]) if self.has_offset else [ideal[1]]
        return best_fit(values, self.grid, product(scales, offsets))

    def _whole(self, ideal: Tensor, unit: Tensor) -> list[Tensor]:
        return [self.scale_grid.snap(ideal * reciprocal(unit) + move) * unit for move in (0, -1, 1)]

    def _whole_codes(self, rounded: Tensor, unit: Tensor) -> Tensor:
        return self.scale_grid.nearest(rounded * reciprocal(unit)).squeeze(-1)


SUPER_QUANTIZERS: Mapping[str, SuperQuantizer] = MappingProxyType(
    {
        q.name: q
        for q in (
            SuperQuantizer("Q2_K", UniformGrid(0, 3), 16, UniformGrid(0, 15), has_offset=True),
            SuperQuantizer("Q3_K", UniformGrid(-4, 3), 16, UniformGrid(-32, 31)),
            SuperQuantizer("Q4_K", UniformGrid(0, 15), 32, UniformGrid(0, 63), has_offset=True),
            SuperQuantizer("Q5_K", UniformGrid(0, 31), 32, UniformGrid(0, 63), has_offset=True),
            SuperQuantizer("Q6_K", UniformGrid(-32, 31), 16, SignedGrid(-128, 127)),
            SuperQuantizer("IQ4_XS", IQ4_GRID, 32, UniformGrid(-32, 31)),
        )
    }
)
