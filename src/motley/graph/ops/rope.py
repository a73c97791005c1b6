"""Rotary position embedding (RoPE), with the scaling types of GGUF files."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from motley.graph.tensor import I32, Op, Sample, Shape, Tensor, Way, draw, mirrored
from motley.graph.values import Value, dense
from motley.ownership import Partial, Split, State

INTERLEAVED = "interleaved"  # pairs (0, 1), (2, 3), …
HALVES = "halves"  # pairs (0, n/2), (1, n/2 + 1), … (NeoX)


@dataclass(frozen=True)
class Yarn:
    """YaRN: low frequencies are interpolated, high frequencies are kept, and those between are blended.

    The blend is linear between the dimensions that rotate `beta_slow` and `beta_fast` times over the original context.
    `rounds`: that range is widened to whole dimensions (most models; not gpt-oss).
    """

    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    rounds: bool = True

    def ramp(self, n_dims: int, base: float) -> torch.Tensor:
        """The original frequency's share of the blend for each pair, 0 … 1. (n_dims / 2,)"""

        def dim_of_rotations(times: float) -> float:
            return n_dims * math.log(self.original_context / (times * 2 * math.pi)) / (2 * math.log(base))

        low, high = dim_of_rotations(self.beta_fast), dim_of_rotations(self.beta_slow)
        if self.rounds:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, n_dims - 1)
        pairs = torch.arange(n_dims // 2, dtype=torch.float32)
        return 1 - ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)


@dataclass(frozen=True)
class Rope(Op):
    """Rotate pairs of the first `n_dims` of each head by position · frequency.

    x (tokens, heads, dim), positions (tokens,), and optionally a divisor for each frequency (n_dims / 2,).
    frequency_i = base^(-2i / n_dims) / divisor_i · frequency_scale; the result is multiplied by `magnitude`.
    """

    name: ClassVar[str] = "rope"
    n_inputs: ClassVar[tuple[int, int]] = (2, 3)
    n_dims: int
    base: float = 10000.0
    style: str = INTERLEAVED
    frequency_scale: float = 1.0
    magnitude: float = 1.0
    yarn: Yarn | None = field(default=None)

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        x, positions, *divisors = inputs
        self.require(len(x.shape) == 3, "x is not (tokens, heads, dim)", x)
        self.require(
            self.n_dims % 2 == 0 and self.n_dims <= x.shape[2], f"cannot rotate {self.n_dims} dims", x
        )
        has_positions = positions.shape == x.shape[:1] and positions.dtype == I32
        self.require(has_positions, "needs one i32 position for each token", x, positions)
        self.require(
            all(d.shape == (self.n_dims // 2,) for d in divisors), "one divisor a pair", x, *divisors
        )
        self.require(self.style in (INTERLEAVED, HALVES), f"no style {self.style!r}")
        return x.shape

    def frequencies(self, divisors: torch.Tensor | None = None) -> torch.Tensor:
        """Radians per position for each pair, float32 (n_dims / 2,)."""
        exponents = torch.arange(0, self.n_dims, 2, dtype=torch.float32) / self.n_dims
        original = 1.0 / self.base**exponents
        if divisors is not None:
            original = original / divisors.to(original.device)
        scaled = original * self.frequency_scale
        if self.yarn is None:
            return scaled
        keep = self.yarn.ramp(self.n_dims, self.base)
        return scaled * (1 - keep) + original * keep

    def reference(self, inputs: Sequence[Value]) -> torch.Tensor:
        x, positions, *divisors = map(dense, inputs)
        frequencies = self.frequencies(*divisors).to(x.device)
        angles = positions.to(torch.float32)[:, None, None] * frequencies  # (tokens, 1, pairs)
        cos, sin = angles.cos() * self.magnitude, angles.sin() * self.magnitude
        result = x.clone()
        if self.style == INTERLEAVED:
            first, second = slice(0, self.n_dims, 2), slice(1, self.n_dims, 2)
        else:
            first, second = slice(0, self.n_dims // 2), slice(self.n_dims // 2, self.n_dims)
        a, b = x[..., first], x[..., second]
        result[..., first] = a * cos - b * sin
        result[..., second] = a * sin + b * cos
        return result

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        x, n_divisors = states[0], len(inputs) - 2
        if isinstance(x, Split) and x.axis == 1:  # each head is rotated separately
            yield Way((x, *mirrored(1 + n_divisors)), x)
        if isinstance(x, Split) and x.axis == 0:
            yield Way((x, Split(0, x.word), *mirrored(n_divisors)), x)
        if isinstance(x, Partial):  # a rotation is linear
            yield Way((x, *mirrored(1 + n_divisors)), x)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        for style in (INTERLEAVED, HALVES):
            n, heads, dim = rng.randint(1, 5), rng.randint(1, 4), rng.choice([32, 64, 80])
            positions = torch.tensor([rng.randrange(4000) for _ in range(n)], dtype=torch.int32)
            x = draw(rng, n, heads, dim)
            yield Sample(Rope(dim, style=style), (x, positions))
            yield Sample(Rope(dim // 2, 5e5, style, 0.25, 1.1, Yarn(512)), (x, positions))
            yield Sample(Rope(dim, 1.5e5, style, 1 / 32, 1.35, Yarn(4096, rounds=False)), (x, positions))
            yield Sample(Rope(dim, 1e6, style), (x, positions, draw(rng, dim // 2).abs() + 0.5))
