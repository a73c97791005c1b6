"""The same values under another shape, in another order, or some of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch

from motley.graph.tensor import Op, Sample, Shape, Tensor, draw


@dataclass(frozen=True)
class Reshape(Op):
    """The same values in row-major order under the shape `to`."""

    name: ClassVar[str] = "reshape"
    is_view: ClassVar[bool] = True
    to: Shape

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        self.require(prod(self.to) == inputs[0].n_values, f"cannot become {self.to}", *inputs)
        return self.to

    def dtype(self, inputs: Sequence[Tensor]) -> str:
        return inputs[0].dtype

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return inputs[0].reshape(self.to)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        a, b, c = (rng.randint(1, 5) for _ in range(3))
        yield Sample(Reshape((a * b, c)), (draw(rng, a, b, c),))
        yield Sample(Reshape((a, b, c)), (draw(rng, a, b * c),))


@dataclass(frozen=True)
class Permute(Op):
    """Axis i of the output is axis `axes[i]` of the input."""

    name: ClassVar[str] = "permute"
    axes: tuple[int, ...]

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        (x,) = inputs
        self.require(sorted(self.axes) == list(range(len(x.shape))), f"{self.axes} is no permutation", x)
        return tuple(x.shape[a] for a in self.axes)

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return inputs[0].permute(self.axes)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        axes = [0, 1, 2]
        rng.shuffle(axes)
        yield Sample(Permute(tuple(axes)), (draw(rng, 2, 3, 5),))


@dataclass(frozen=True)
class Slice(Op):
    """Indices [start, stop) of one axis."""

    name: ClassVar[str] = "slice"
    axis: int
    start: int
    stop: int

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        (x,) = inputs
        self.require(0 <= self.axis < len(x.shape), f"no axis {self.axis}", x)
        self.require(0 <= self.start <= self.stop <= x.shape[self.axis], "outside the axis", x)
        return (*x.shape[: self.axis], self.stop - self.start, *x.shape[self.axis + 1 :])

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return inputs[0].narrow(self.axis, self.start, self.stop - self.start)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        n = rng.randint(1, 9)
        start = rng.randint(0, n)
        yield Sample(Slice(1, start, rng.randint(start, n)), (draw(rng, 3, n),))


@dataclass(frozen=True)
class Concat(Op):
    """Inputs one after the other along `axis`."""

    name: ClassVar[str] = "concat"
    n_inputs: ClassVar[tuple[int, int]] = (1, 16)
    axis: int

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        first = inputs[0].shape
        self.require(0 <= self.axis < len(first), f"no axis {self.axis}", *inputs)
        rests = {(*t.shape[: self.axis], *t.shape[self.axis + 1 :]) for t in inputs}
        self.require(len(rests) == 1, "the other axes differ", *inputs)
        total = sum(t.shape[self.axis] for t in inputs)
        return (*first[: self.axis], total, *first[self.axis + 1 :])

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(inputs), self.axis)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        yield Sample(Concat(1), tuple(draw(rng, 3, rng.randint(0, 5), 2) for _ in range(3)))


@dataclass(frozen=True)
class Repeat(Op):
    """Each index of `axis` `times` times in a row: a b → a a b b."""

    name: ClassVar[str] = "repeat"
    axis: int
    times: int

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        (x,) = inputs
        self.require(0 <= self.axis < len(x.shape) and self.times >= 1, "no such axis, or no times", x)
        return (*x.shape[: self.axis], x.shape[self.axis] * self.times, *x.shape[self.axis + 1 :])

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return inputs[0].repeat_interleave(self.times, self.axis)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        yield Sample(Repeat(rng.randint(0, 2), rng.randint(1, 4)), (draw(rng, 2, 3, 4),))
