"""`Tensor`, a node of the graph, and `Op`, an operation: shape rule, split rule, reference and samples in one place.

An op is a frozen dataclass whose fields are its attributes, so `RmsNorm(eps=1e-6)(x, weight)` adds a node and
`node.op.eps` is typed. Tensors are immutable and compare by identity; a graph is all that its outputs depend on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from motley.errors import GraphError
from motley.ownership import MIRRORED, State

Shape = tuple[int, ...]

# Types of values between ops. A weight's type is the name of its packed format instead ("Q4_K").
F32 = "f32"
I32 = "i32"
CACHE = "cache"  # one layer of the KV cache: a handle, no activation memory
RECURRENT = "recurrent"  # a part of one layer's recurrent state: a handle, too
HANDLES = (CACHE, RECURRENT)


@dataclass(frozen=True, eq=False)
class Tensor:
    """A value in a graph: shape and dtype, and the op and inputs that it is computed from."""

    op: Op
    inputs: tuple[Tensor, ...]
    shape: Shape
    dtype: str
    name: str = ""

    @property
    def n_values(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    def __repr__(self) -> str:
        return f"<{self.name or self.op.name} {self.dtype} {self.shape}>"


@dataclass(frozen=True)
class Sample:
    """Sample inputs of an op, used by the tests of the op and of all its kernels."""

    op: Op
    inputs: tuple[Any, ...]


@dataclass(frozen=True)
class Way:
    """A way to compute an op on parts: the states of the inputs, and the state of the output."""

    inputs: tuple[State, ...]
    output: State


@dataclass(frozen=True)
class Op:
    """One operation. Subclasses are frozen dataclasses of attributes and override the rules below."""

    name: ClassVar[str]
    n_inputs: ClassVar[tuple[int, int]] = (1, 1)  # fewest, most
    tolerance: ClassVar[float] = 1e-5  # relative, for kernels against `reference`
    is_view: ClassVar[bool] = False  # the output is the first input's memory under another shape
    is_constant: ClassVar[bool] = False  # the same in every batch: computed once, when a plan is prepared

    def __call__(self, *inputs: Tensor, name: str = "") -> Tensor:
        low, high = self.n_inputs
        if not low <= len(inputs) <= high:
            raise GraphError(f"{self.name}: takes {low} to {high} inputs, got {len(inputs)}")
        return Tensor(self, inputs, self.shape(inputs), self.dtype(inputs), name)

    def shape(self, inputs: Sequence[Tensor]) -> Shape:
        """The shape rule. Raises GraphError for inputs the op cannot take."""
        raise GraphError(f"{self.name} has no shape rule")

    def dtype(self, inputs: Sequence[Tensor]) -> str:
        return F32

    def reference(self, inputs: Sequence[Any]) -> Any:
        """The specification of the op on torch tensors: slow and obviously right."""
        raise GraphError(f"{self.name} has no reference: it cannot be run by itself")

    def ways(self, inputs: Sequence[Tensor], states: Sequence[State]) -> Iterator[Way]:
        """The split rule: ways to compute the op on parts, best first, given the states that its inputs have.

        A way may require other input states; inference compares the cost of the transitions. Two ways are not listed
        because every op has them: all mirrored, and everything on one device.
        """
        return iter(())

    def local(self, inputs: Sequence[Tensor], way: Way, shape: Shape, device: int, name: str) -> Tensor:
        """This op on a device's parts of its inputs; `shape` is the shape of the device's part of the output."""
        return self(*inputs, name=name)

    def samples(self, rng: random.Random) -> Iterator[Sample]:
        """Random inputs of the important shapes. Each sample has its own op; the instance's attributes are not used."""
        return iter(())

    def require(self, condition: bool, why: str, *inputs: Tensor) -> None:
        if not condition:
            shapes = ", ".join(f"{t.name or t.op.name}{t.shape}" for t in inputs)
            raise GraphError(f"{self.name}: {why}" + (f" (inputs: {shapes})" if shapes else ""))

    @property
    def attributes(self) -> str:
        """The attributes as text, for printing: `eps=1e-06, axis=1`."""
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))


def draw(rng: random.Random, *shape: int) -> torch.Tensor:
    """Standard normal float32 values that depend on `rng` only."""
    generator = torch.Generator().manual_seed(rng.getrandbits(63))
    return torch.randn(*shape, generator=generator)


def draw_ids(rng: random.Random, n: int, below: int) -> torch.Tensor:
    return torch.tensor([rng.randrange(below) for _ in range(n)], dtype=torch.int32)


def mirrored(n: int) -> tuple[State, ...]:
    return (MIRRORED,) * n
