"""Stages: nodes that one kernel runs together. Values inside a stage are never written to memory.

    Single           one node; with a rotation, also the Hadamard transform beside it
    Linear           products of one input with one or several matrices, with biases, residuals and a gate
    Gate             activation(gate) · up
    Norm             RmsNorm, of chosen rows where they are given
    AttentionBlock   norms of queries and keys, rope, rotation, cache store and attention, up to the rotation back
    Routing          norm, router, choice of experts and their weights
    Experts          the FFN of chosen experts and a residual
    DeltaRule        the gated delta rule with its decay and strength
    GatedNorm        RmsNorm · activation(gate)

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
    norms: tuple[Norm, Norm] | None = None  # of each head's queries and keys, before the ropes

    @property
    def queries(self) -> Tensor:
        """(tokens, heads, dim), before norm and rope."""
        return self.q.inputs[0] if self.norms is None else self.norms[0].x

    @property
    def keys(self) -> Tensor:
        """(tokens, KV heads, dim), before norm and rope."""
        return self.k.inputs[0] if self.norms is None else self.norms[1].x

    @property
    def values(self) -> Tensor:
        """(tokens, KV heads, dim), before their rotation."""
        return self.store.inputs[2]

    @property
    def cache(self) -> Tensor:
        return self.store.inputs[0]

    @property
    def rope(self) -> Rope:
        """The rope of the queries."""
        assert isinstance(self.q.node.op, Rope)
        return self.q.node.op

    @property
    def op(self) -> Attention:
        assert isinstance(self.attention.node.op, Attention)
        return self.attention.node.op

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Queries, keys and values; the cache; what norms, ropes and attention read besides (positions, sinks, …)."""
        own = (*self.q.inputs[1:], *self.k.inputs[1:], *self.attention.inputs[2:])
        weights = (norm.weight for norm in self.norms or () if norm.weight is not None)
        return tuple(dict.fromkeys((self.queries, self.keys, self.values, self.cache, *own, *weights)))

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return (self.attention.out,)


@dataclass(frozen=True)
class Routing:
    """The choice of experts and their weights, by a router's logits x·weightᵀ (+ bias); the norm that makes x."""

    x: Tensor  # of the router; the norm's result, where there is one
    weight: Tensor
    bias: Tensor | None
    route: Tensor  # the node of graph.ops.Route
    weigh: Tensor  # the node of graph.ops.RouteWeights
    norm: Norm | None = None
    shared_gate: Part | None = None  # a product of x with one row: of the shared expert's gate

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        before = (self.x,) if self.norm is None else self.norm.inputs
        bias = () if self.bias is None else (self.bias,)
        gate = () if self.shared_gate is None else (self.shared_gate.weight,)
        return (*before, self.weight, *bias, *self.route.inputs[1:], *gate)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        gate = () if self.shared_gate is None else (self.shared_gate.out,)
        return (*(() if self.norm is None else (self.x,)), self.route, self.weigh, *gate)


@dataclass(frozen=True)
class Experts:
    """out = the FFN of chosen experts (`node`) + residual (+ σ(gate) · shared, where there is a shared expert)."""

    node: Tensor
    residual: Tensor
    out: Tensor
    shared: tuple[Tensor, Tensor] | None = None  # the shared expert's result, and its gate (tokens, 1)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (*self.node.inputs, self.residual, *(self.shared or ()))

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return (self.out,)


@dataclass(frozen=True)
class DeltaRule:
    """A DeltaNet (`node`) with decay = factor · softplus(a + offset) and beta = σ(b)."""

    node: Tensor
    a: Tensor  # (tokens, value heads)
    b: Tensor  # (tokens, value heads)
    offset: Tensor  # a weight
    factor: Tensor  # a weight

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        mixed, _, _, state = self.node.inputs
        return mixed, self.a, self.b, self.offset, self.factor, state

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return (self.node,)


@dataclass(frozen=True)
class GatedNorm:
    """out = norm · function(gate), all of one shape."""

    norm: Norm
    gate: Tensor
    out: Tensor
    function: str

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (*self.norm.inputs, self.gate)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return (self.out,)


Stage = Single | Linear | Gate | Norm | AttentionBlock | Routing | Experts | DeltaRule | GatedNorm


def describe(stage: Stage) -> str:
    """A stage in an error: `scale(f32(2, 3)) → f32(2, 3)`."""
    name = stage.node.op.name if isinstance(stage, Single) else type(stage).__name__
    inputs, outputs = (
        ", ".join(f"{t.dtype}{t.shape}" for t in tensors) for tensors in (stage.inputs, stage.outputs)
    )
    return f"{name}({inputs}) → {outputs}"
