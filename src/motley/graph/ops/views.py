"""The same values under another shape, in another order, or some of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch

from motley.errors import SplitError
from motley.graph.tensor import Op, Sample, Shape, Tensor, Way, draw
from motley.ownership import (
    Split,
    State,
    concat_state,
    permute_state,
    reshape_state,
    slice_state,
)


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

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        with suppress(SplitError):
            yield Way((states[0],), reshape_state(states[0], inputs[0].shape, self.to))

    def local(self, inputs: Sequence[Tensor], way: Way, shape: Shape, device: int, name: str) -> Tensor:
        return Reshape(shape)(*inputs, name=name)

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

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        yield Way((states[0],), permute_state(states[0], self.axes))

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

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        yield Way((states[0],), slice_state(states[0], self.axis, self.start, self.stop))

    def local(self, inputs: Sequence[Tensor], way: Way, shape: Shape, device: int, name: str) -> Tensor:
        state = way.inputs[0]
        if isinstance(state, Split) and state.axis == self.axis:
            return Slice(self.axis, *state.word.local_range(device, self.start, self.stop))(
                *inputs, name=name
            )
        return self(*inputs, name=name)

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

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        with suppress(SplitError):
            joined = concat_state(states, self.axis, [t.shape for t in inputs])
            parts = [_along(joined, state, t.shape) for state, t in zip(states, inputs, strict=True)]
            yield Way(tuple(parts), joined)
        for state in states:  # mirrored inputs can be split like this one across the concatenation axis
            if isinstance(state, Split) and state.axis != self.axis:
                yield Way((state,) * len(inputs), state)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        yield Sample(Concat(1), tuple(draw(rng, 3, rng.randint(0, 5), 2) for _ in range(3)))


def _along(joined: State, part: State, shape: Shape) -> State:
    """The state of a part as a split along the axis of `joined`. A sole owner's part may be a split of another axis."""
    if isinstance(joined, Split) and isinstance(part, Split):
        return part.along(joined.axis, shape) or part
    return part


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

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        (x,) = states
        is_along = isinstance(x, Split) and x.axis == self.axis
        yield Way((x,), Split(x.axis, x.word.stretch(self.times)) if isinstance(x, Split) and is_along else x)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        yield Sample(Repeat(rng.randint(0, 2), rng.randint(1, 4)), (draw(rng, 2, 3, 4),))
