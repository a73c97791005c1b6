"""Elementwise ops, and softmax, which works on rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from motley.graph.tensor import Op, Sample, Shape, Tensor, Way, draw
from motley.graph.values import Value, dense
from motley.ownership import MIRRORED, PARTIAL, Mirrored, Partial, Split, State


def _broadcast(op: Op, a: Tensor, b: Tensor) -> Shape:
    """The result's shape, which is `a`'s. `b` may lack leading axes of `a`, and may have size 1 where `a` does not."""
    padded = (1,) * (len(a.shape) - len(b.shape)) + b.shape
    fits = len(padded) == len(a.shape) and all(q in (1, p) for p, q in zip(a.shape, padded, strict=True))
    op.require(fits, "the second input does not broadcast to the first", a, b)
    return a.shape


def _same_split(inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
    """Both inputs are split alike; the second is mirrored if it broadcasts along the split axis."""
    a, b = inputs
    missing = len(a.shape) - len(b.shape)
    for state, shift in zip(states, (0, missing), strict=True):
        if not isinstance(state, Split):
            continue
        axis = state.axis + shift  # the same axis of a
        if a.shape[axis] != len(state.word):  # b broadcasts along this axis, so a cannot be split like b
            continue
        is_broadcast = axis < missing or b.shape[axis - missing] == 1 != a.shape[axis]
        second = MIRRORED if is_broadcast else Split(axis - missing, state.word)
        yield Way((Split(axis, state.word), second), Split(axis, state.word))


def _keep_split(states: Sequence[State]) -> Iterator[Way]:
    """Ways of an elementwise op with one input: any split of the input is kept."""
    if isinstance(states[0], Split):
        yield Way((states[0],), states[0])


@dataclass(frozen=True)
class Add(Op):
    """a + b; b broadcasts (a bias)."""

    name: ClassVar[str] = "add"
    n_inputs: ClassVar[tuple[int, int]] = (2, 2)

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        return _broadcast(self, *inputs)

    def reference(self, inputs: Sequence[Value]) -> torch.Tensor:
        a, b = map(dense, inputs)
        return a + b

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        yield from _same_split(inputs, states)
        if PARTIAL in states:  # partial + partial is partial: the all-reduce is postponed
            yield Way((PARTIAL, PARTIAL), PARTIAL)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        n, m = rng.randint(1, 9), rng.randint(1, 33)
        yield Sample(Add(), (draw(rng, n, m), draw(rng, n, m)))
        yield Sample(Add(), (draw(rng, n, m), draw(rng, m)))


@dataclass(frozen=True)
class Mul(Op):
    """a · b, value by value; b broadcasts."""

    name: ClassVar[str] = "mul"
    n_inputs: ClassVar[tuple[int, int]] = (2, 2)

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        return _broadcast(self, *inputs)

    def reference(self, inputs: Sequence[Value]) -> torch.Tensor:
        a, b = map(dense, inputs)
        return a * b

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        yield from _same_split(inputs, states)
        match states:  # linear in each input while the other is whole
            case (Partial(), Mirrored()):
                yield Way((PARTIAL, MIRRORED), PARTIAL)
            case (Mirrored(), Partial()):
                yield Way((MIRRORED, PARTIAL), PARTIAL)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        n, m = rng.randint(1, 9), rng.randint(1, 33)
        yield Sample(Mul(), (draw(rng, n, m), draw(rng, n, m)))
        yield Sample(Mul(), (draw(rng, n, m), draw(rng, n, 1)))


@dataclass(frozen=True)
class Scale(Op):
    """factor · x."""

    name: ClassVar[str] = "scale"
    factor: float

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        return inputs[0].shape

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return inputs[0] * self.factor

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        yield Way((states[0],), states[0])

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        yield Sample(Scale(rng.uniform(-2, 2)), (draw(rng, rng.randint(1, 9), 7),))


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
}


@dataclass(frozen=True)
class Activation(Op):
    """A non-linear function by name: silu, gelu, gelu_tanh, relu, sigmoid, tanh, softplus."""

    name: ClassVar[str] = "activation"
    function: str

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        known = ", ".join(_ACTIVATIONS)
        self.require(self.function in _ACTIVATIONS, f"no function {self.function!r}; there are {known}")
        return inputs[0].shape

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return _ACTIVATIONS[self.function](inputs[0])

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        yield from _keep_split(states)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        for function in _ACTIVATIONS:
            yield Sample(Activation(function), (draw(rng, rng.randint(1, 9), rng.randint(1, 33)),))


@dataclass(frozen=True)
class Softmax(Op):
    """Softmax along the last axis."""

    name: ClassVar[str] = "softmax"

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        return inputs[0].shape

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.softmax(inputs[0], dim=-1)

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        if isinstance(states[0], Split) and states[0].axis < len(inputs[0].shape) - 1:
            yield from _keep_split(states)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        yield Sample(Softmax(), (draw(rng, rng.randint(1, 9), rng.randint(1, 33)),))
