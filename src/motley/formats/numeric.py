"""Arithmetic whose results stay finite for extreme inputs."""

from __future__ import annotations

import torch
from torch import Tensor

_HALF_MAX = torch.finfo(torch.float16).max


def to_half(values: Tensor) -> Tensor:
    """`values` as float16, saturating: an infinite scale would change zeros to NaN."""
    return values.clamp(-_HALF_MAX, _HALF_MAX).half()


def reciprocal(values: Tensor) -> Tensor:
    """1 / values, and 0 where that is not finite: at zero, and far below the smallest float16."""
    inverse = 1 / values
    return torch.where(inverse.isfinite(), inverse, 0.0)


def farthest_from_zero(values: Tensor) -> Tensor:
    """Along the last axis, the value of the largest magnitude, with its sign: (..., n) -> (..., 1)."""
    return values.gather(-1, values.abs().argmax(-1, keepdim=True))


def least_squares_scale(values: Tensor, levels: Tensor) -> Tensor:
    """The s that brings s * levels closest to values, along the last axis: (..., n) -> (..., 1)."""
    return (values * levels).sum(-1, keepdim=True) * reciprocal(levels.square().sum(-1, keepdim=True))
