"""The search for the scale (and offset) that quantizes a block with the smallest squared error.

Rounding makes the error a jagged function of the scale. So several trial scales are rounded, each is fitted
again to the resulting levels (by least squares, the best for fixed levels), and the best is kept. All
blocks are searched at once: the loops run over trials only. The squares of values must not overflow float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from motley.formats.grids import Grid
from motley.formats.numeric import farthest_from_zero, least_squares_scale, reciprocal

_TRIALS = 9  # targets for the outermost value, within one spacing of the grid's end
_REFINEMENTS = 2  # rounds of: the best levels for the fit, the best fit for the levels

Fit = tuple[Tensor, Tensor]  # scale and offset, each (..., 1): value = scale * level - offset


def fit_scale(values: Tensor, grid: Grid) -> Fit:
    """The scale for a grid on both sides of zero, without an offset."""
    farthest = farthest_from_zero(values)
    no_offset = torch.zeros_like(farthest)

    def trials() -> Iterator[Fit]:
        for end in (grid.lowest, grid.highest):
            for target in _around(end, grid.spacing):
                levels = _snap(values, grid, (farthest / target, no_offset))
                yield least_squares_scale(values, levels), no_offset

    return best_fit(values, grid, trials())


def fit_scale_and_offset(values: Tensor, grid: Grid) -> Fit:
    """The scale and the offset, neither below zero, for a grid that starts at zero."""
    lowest, highest = values.aminmax(dim=-1, keepdim=True)
    offset = -lowest.clamp(max=0.0)

    def trials() -> Iterator[Fit]:
        for top in _around(grid.highest, grid.spacing):
            yield _affine_least_squares(values, _snap(values, grid, ((highest + offset) / top, offset)))

    best = best_fit(values, grid, trials())
    for _ in range(_REFINEMENTS):
        refined = _affine_least_squares(values, _snap(values, grid, best))
        best = best_fit(values, grid, (best, refined))
    return best


def best_fit(values: Tensor, grid: Grid, trials: Iterable[Fit]) -> Fit:
    """For each block, the trial with the smallest error."""
    trials = iter(trials)
    scale, offset = next(trials)
    least = _squared_error(values, grid, (scale, offset))
    for trial in trials:
        error = _squared_error(values, grid, trial)
        is_better = error < least
        least = torch.where(is_better, error, least)
        scale = torch.where(is_better, trial[0], scale)
        offset = torch.where(is_better, trial[1], offset)
    return scale, offset


def _around(level: int, spacing: float) -> Iterator[float]:
    for step in range(_TRIALS):
        yield level + spacing * (2 * step / (_TRIALS - 1) - 1)


def _snap(values: Tensor, grid: Grid, fit: Fit) -> Tensor:
    """The nearest level of each value."""
    scale, offset = fit
    return grid.snap((values + offset).mul_(reciprocal(scale)))


def _squared_error(values: Tensor, grid: Grid, fit: Fit) -> Tensor:
    """The squared error of each block: (..., n) -> (..., 1)."""
    scale, offset = fit
    return _snap(values, grid, fit).mul_(scale).sub_(offset).sub_(values).square_().sum(-1, keepdim=True)


def _affine_least_squares(values: Tensor, levels: Tensor) -> Fit:
    """The fit with the smallest error of scale * levels - offset, with an offset of at least zero."""
    n = values.shape[-1]
    sum_v, sum_q = values.sum(-1, keepdim=True), levels.sum(-1, keepdim=True)
    sum_qq, sum_qv = levels.square().sum(-1, keepdim=True), (levels * values).sum(-1, keepdim=True)
    inverse = reciprocal(n * sum_qq - sum_q.square())
    scale = (n * sum_qv - sum_q * sum_v) * inverse
    offset = torch.where(inverse > 0, (sum_q * sum_qv - sum_qq * sum_v) * inverse, -sum_v / n)
    # With the offset fixed at zero the best scale is different.
    return torch.where(offset > 0, scale, sum_qv * reciprocal(sum_qq)), offset.clamp(min=0.0)
