"""Matrix products."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from motley.formats import FORMATS, PackedTensor
from motley.graph.tensor import Op, Sample, Shape, Tensor, Way, draw
from motley.graph.values import Value, dense
from motley.ownership import MIRRORED, PARTIAL, Mirrored, Partial, Split, State, Word


def cuts_whole_blocks(word: Word, weight: Tensor) -> bool:
    """Whether cutting the last axis of `weight` by `word` leaves its quant blocks whole."""
    size = FORMATS[weight.dtype].block_size if weight.dtype in FORMATS else 1
    return word.factor_outer(size) is not None


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

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        last = len(inputs[0].shape) - 1
        x, weight = states
        if isinstance(weight, Split) and weight.axis == 0:
            yield Way((MIRRORED, weight), Split(last, weight.word))
        if isinstance(weight, Split) and weight.axis == 1:
            yield Way((Split(last, weight.word), weight), PARTIAL)
        if isinstance(x, Split) and x.axis == last and cuts_whole_blocks(x.word, inputs[1]):
            yield Way((x, Split(1, x.word)), PARTIAL)
        if isinstance(x, Split) and x.axis < last:
            yield Way((x, MIRRORED), x)
        if isinstance(x, Partial):
            yield Way((PARTIAL, MIRRORED), PARTIAL)

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
        self.require(
            len(a.shape) == len(b.shape) >= 2, "both need the same number of axes, two or more", a, b
        )
        self.require(a.shape[:-2] == b.shape[:-2], "the batch axes differ", a, b)
        self.require(a.shape[-1] == b.shape[-2], "the inner axes differ", a, b)
        return (*a.shape[:-1], b.shape[-1])

    def reference(self, inputs: Sequence[Value]) -> torch.Tensor:
        a, b = map(dense, inputs)
        return a @ b

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        n = len(inputs[0].shape)
        match states:
            case (Split(axis, word), _) | (_, Split(axis, word)) if axis < n - 2:
                yield Way((Split(axis, word), Split(axis, word)), Split(axis, word))
            case (Partial(), Mirrored()) | (Mirrored(), Partial()):
                yield Way((states[0], states[1]), PARTIAL)
        a, b = states
        if isinstance(a, Split) and a.axis == n - 2:
            yield Way((a, MIRRORED), a)
        if isinstance(b, Split) and b.axis == n - 1:
            yield Way((MIRRORED, b), b)
        if isinstance(a, Split) and a.axis == n - 1:
            yield Way((a, Split(n - 2, a.word)), PARTIAL)
        if isinstance(b, Split) and b.axis == n - 2:
            yield Way((Split(n - 1, b.word), b), PARTIAL)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        m, n, k = (rng.randint(1, 17) for _ in range(3))
        yield Sample(BatchMatMul(), (draw(rng, 3, m, k), draw(rng, 3, k, n)))
