"""Matrix products."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from motley.formats import FORMATS, PackedTensor
from motley.graph.tensor import Op, Sample, Shape, Tensor, draw
from motley.graph.values import Value, dense


@dataclass(frozen=True)
class MatMul(Op):
    """x·Wᵀ: x (…, K), W (N, K), usually packed → (…, N)."""

    name: ClassVar[str] = "matmul"
    n_inputs: ClassVar[tuple[int, int]] = (2, 2)
    tolerance: ClassVar[float] = 1e-4

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        x, weight = inputs
        self.require(len(weight.shape) == 2, "the weight is not a matrix", x, weight)
        self.require(x.shape[-1:] == weight.shape[-1:], "the last axes differ", x, weight)
        return (*x.shape[:-1], weight.shape[0])

    def reference(self, inputs: Sequence[Value]) -> torch.Tensor:
        x, weight = map(dense, inputs)
        return F.linear(x, weight)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        for name in FORMATS:
            fmt = FORMATS[name]
            n, k = rng.randint(1, 40), fmt.block_size * (rng.randint(1, 3) if fmt.block_size > 1 else 37)
            weight = PackedTensor(fmt.pack(draw(rng, n, k)), fmt)
            yield Sample(MatMul(), (draw(rng, rng.randint(1, 5), k), weight))


@dataclass(frozen=True)
class BatchMatMul(Op):
    """a·b over leading batch axes: a (…, M, K), b (…, K, N) → (…, M, N)."""

    name: ClassVar[str] = "batch_matmul"
    n_inputs: ClassVar[tuple[int, int]] = (2, 2)
    tolerance: ClassVar[float] = 1e-4

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        a, b = inputs
        self.require(len(a.shape) == len(b.shape) >= 2, "both need the same number of axes, two or more", a, b)
        self.require(a.shape[:-2] == b.shape[:-2], "the batch axes differ", a, b)
        self.require(a.shape[-1] == b.shape[-2], "the inner axes differ", a, b)
        return (*a.shape[:-1], b.shape[-1])

    def reference(self, inputs: Sequence[Value]) -> torch.Tensor:
        a, b = map(dense, inputs)
        return a @ b

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        m, n, k = (rng.randint(1, 17) for _ in range(3))
        yield Sample(BatchMatMul(), (draw(rng, 3, m, k), draw(rng, 3, k, n)))
