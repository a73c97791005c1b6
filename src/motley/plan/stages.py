"""Stages: what one kernel takes together. What lies inside a stage is never written to memory.

    Single           one node; with a rotation, also the Hadamard transform beside it
    Linear           products of one input with one or several matrices, with biases, residuals and a gate
    Gate             activation(gate) · up
    Norm             RmsNorm, of chosen rows where they are given
    AttentionBlock   rope, rotation, cache store and attention, up to the rotation back

`inputs` are the tensors that a stage reads, `outputs` those that it makes, both as nodes of the graph. A view (Reshape)
is no stage: its readers read the memory of what it is a view of.
"""

from __future__ import annotations

from dataclasses import dataclass

from motley.graph import Tensor
from motley.graph.ops import Attention, Rope


@dataclass(frozen=True)
class Single:
    """One node. `rotation` is the size of a Hadamard transform that is folded into it; 0: none.

    After a rope or an attention the transform is of the result, and `out` is the transform's node. Of a cache store it
    is of the values, and `inputs` holds them as they are before it.
    """

    node: Tensor
    out: Tensor
    inputs: tuple[Tensor, ...]
    rotation: int = 0

    @staticmethod
    def of(node: Tensor) -> Single:
        return Single(node, node, node.inputs)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return (self.out,)


@dataclass(frozen=True)
class Part:
    """One product of a `Linear`: out = x·weightᵀ (+ bias) (+ residual)."""

    weight: Tensor
    out: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None


@dataclass(frozen=True)
class Linear:
    """Products of x with matrices. With a gate there are two parts: out = gate(first) · second."""

    x: Tensor
    parts: tuple[Part, ...]
    gate: str = ""  # the activation's name

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        extras = (t for part in self.parts for t in (part.weight, part.bias, part.residual) if t is not None)
        return self.x, *extras

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return tuple(part.out for part in (self.parts[:1] if self.gate else self.parts))


@dataclass(frozen=True)
class Gate:
    """out = function(gate) · up, all of one shape."""

    gate: Tensor
    up: Tensor
    out: Tensor
    function: str

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.gate, self.up

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return (self.out,)


@dataclass(frozen=True)
class Norm:
    """out = RmsNorm(x) (· weight); with `rows`: of x's rows with these ids only."""

    x: Tensor
    weight: Tensor | None
    out: Tensor
    eps: float
    rows: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.x, *(t for t in (self.weight, self.rows) if t is not None)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return (self.out,)


@dataclass(frozen=True)
class AttentionBlock:
    """An attention with the ropes of its queries and keys and with its cache store, each with its rotation."""

    q: Single  # a rope
    k: Single  # a rope
    store: Single
    attention: Single

    @property
    def values(self) -> Tensor:
        """(tokens, KV heads, dim), before their rotation."""
        return self.store.inputs[2]

    @property
    def cache(self) -> Tensor:
        return self.store.inputs[0]

    @property
    def rope(self) -> Rope:
        """Of the queries."""
        assert isinstance(self.q.node.op, Rope)
        return self.q.node.op

    @property
    def op(self) -> Attention:
        assert isinstance(self.attention.node.op, Attention)
        return self.attention.node.op

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Queries, keys and values; the cache; what ropes and attention read besides (positions, divisors, sinks)."""
        own = (*self.q.inputs[1:], *self.k.inputs[1:], *self.attention.inputs[2:])
        return tuple(dict.fromkeys((self.q.inputs[0], self.k.inputs[0], self.values, self.cache, *own)))

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return (self.attention.out,)


Stage = Single | Linear | Gate | Norm | AttentionBlock


def describe(stage: Stage) -> str:
    """A stage in an error: `scale(f32(2, 3)) → f32(2, 3)`."""
    name = stage.node.op.name if isinstance(stage, Single) else type(stage).__name__
    inputs, outputs = (
        ", ".join(f"{t.dtype}{t.shape}" for t in tensors) for tensors in (stage.inputs, stage.outputs)
    )
    return f"{name}({inputs}) → {outputs}"
