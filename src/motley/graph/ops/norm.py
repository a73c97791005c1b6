"""Normalisations."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from motley.graph.tensor import Op, Sample, Shape, Tensor, Way, draw, mirrored
from motley.graph.values import Value, dense
from motley.ownership import Split, State


@dataclass(frozen=True)
class RmsNorm(Op):
    """x / sqrt(mean(x²) + eps) · weight, along the last axis; the weight is optional."""

    name: ClassVar[str] = "rms_norm"
    n_inputs: ClassVar[tuple[int, int]] = (1, 2)
    eps: float

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        x = inputs[0]
        for weight in inputs[1:]:
            self.require(
                weight.shape == x.shape[-1:], "the weight is not as long as the last axis", x, weight
            )
        return x.shape

    def reference(self, inputs: Sequence[Value]) -> torch.Tensor:
        x, *weight = map(dense, inputs)
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return normed * weight[0] if weight else normed

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        """Each row is normalised separately, so every axis except the last can be split."""
        x = states[0]
        if isinstance(x, Split) and x.axis < len(inputs[0].shape) - 1:
            yield Way((x, *mirrored(len(inputs) - 1)), x)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        n = rng.choice([1, 31, 64, 130])
        yield Sample(RmsNorm(1e-5), (draw(rng, rng.randint(1, 5), n), draw(rng, n)))
        yield Sample(RmsNorm(1e-6), (draw(rng, 2, 3, n), draw(rng, n)))
        yield Sample(RmsNorm(1e-6), (draw(rng, 2, n),))
