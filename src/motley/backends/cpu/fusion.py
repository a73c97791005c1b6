"""Which nodes run together: a device plan as a list of stages, each one or a few kernel calls.

Fused are: matrix products of one input (Q, K, V in one pass) with their biases and the residual that follows,
gate · up with the activation, rope with the rotation, the rotation of values with their store, the attention with the
rotation back. What lies inside a stage is never written to memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from motley.graph import Tensor
from motley.graph.ops import (
    Activation,
    Add,
    Attention,
    CacheStore,
    Hadamard,
    MatMul,
    Mul,
    Reshape,
    Rope,
    Weight,
)
from motley.plan import DevicePlan, Kernel
from motley.split.collectives import AllGather, AllReduce, Broadcast, Receive, Send

_MAX_PARTS = 4  # of one pass (csrc/kernels.hpp)


@dataclass(frozen=True)
class Part:
    """One matrix product of a pass: out = x·weightᵀ (+ bias) (+ residual)."""

    weight: Tensor
    out: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None


@dataclass(frozen=True)
class Linear:
    """Matrix products of one input; with a gate: gate(first) · second."""

    x: Tensor
    parts: tuple[Part, ...]
    gate: str = ""

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return tuple(part.out for part in (self.parts[:1] if self.gate else self.parts))

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.x, *(part.residual for part in self.parts if part.residual is not None)


@dataclass(frozen=True)
class Single:
    """One node, with what is folded into it: the sizes of Hadamard transforms, and where the result goes."""

    node: Tensor
    out: Tensor
    inputs: tuple[Tensor, ...]
    rotation: int = 0  # of the result; of a cache store: of the values

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return (self.out,)


@dataclass(frozen=True)
class Meeting:
    """A collective that native programs do among themselves."""

    node: Tensor
    kernel: Kernel

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.node.inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return (self.node,)


@dataclass(frozen=True)
class Foreign(Meeting):
    """A node that another kernel runs, between two programs."""


Stage = Linear | Single | Meeting | Foreign


def fuse(plan: DevicePlan) -> list[Stage]:
    """Stages in an order in which they can run."""
    return _Fusion(plan).stages()


@dataclass
class _Fusion:
    plan: DevicePlan
    order: dict[Tensor, int] = field(init=False)
    users: dict[Tensor, list[Tensor]] = field(init=False)
    native: set[Tensor] = field(init=False)
    done: set[Tensor] = field(default_factory=set)  # nodes that some stage computes
    # Of each store: values, and the rotation that is still to be made.
    stored: dict[Tensor, tuple[Tensor, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order = {node: i for i, node in enumerate(self.plan.graph.nodes)}
        self.users = defaultdict(list)
        for node in self.plan.graph.nodes:
            for tensor in node.inputs:
                self.users[tensor].append(node)
        for tensor in self.plan.graph.outputs:
            self.users[tensor].append(tensor)  # somebody wants to see it
        self.native = {step.node for step in self.plan.steps if step.kernel.name == "native"}
        for node in self.native:
            if isinstance(node.op, CacheStore):
                self._delay_rotation(node)

    def stages(self) -> list[Stage]:
        result: list[Stage] = []
        for step in self.plan.steps:
            node = step.node
            if node in self.done:
                continue
            if node not in self.native:
                is_meeting = is_native_collective(node) and getattr(step.kernel, "meeting", None) is not None
                result.append(Meeting(node, step.kernel) if is_meeting else Foreign(node, step.kernel))
            elif not isinstance(node.op, Reshape):
                stage = self._stage(node)
                self.done.update(stage.outputs)
                result.append(stage)
        return result

    def _stage(self, node: Tensor) -> Stage:
        if isinstance(node.op, MatMul) and isinstance(node.inputs[1].op, Weight):
            return self._linear(node)
        if isinstance(node.op, Rope | Attention):
            size, out = self._rotation_after(node)
            return Single(node, out, node.inputs, size)
        if node in self.stored:
            values, size = self.stored[node]
            return Single(node, node, (*node.inputs[:2], values), size)
        return Single(node, node, node.inputs)

    def _linear(self, node: Tensor) -> Linear:
        x = node.inputs[0]
        siblings = [
            user
            for user in self.users[x]
            if user in self.native
            and user not in self.done
            and isinstance(user.op, MatMul)
            and user.inputs[0] is x
            and isinstance(user.inputs[1].op, Weight)
        ]
        gated = self._gated(siblings)
        if gated is not None:
            return gated
        at = self.order[node]
        return Linear(x, tuple(self._with_additions(Part(s.inputs[1], s), at) for s in siblings[:_MAX_PARTS]))

    def _gated(self, siblings: Sequence[Tensor]) -> Linear | None:
        """activation(gate) · up, where nothing else reads either."""
        if len(siblings) != 2:
            return None
        for first, second in (siblings, siblings[::-1]):
            gate, up = (
                self._with_bias(Part(first.inputs[1], first)),
                self._with_bias(Part(second.inputs[1], second)),
            )
            active, product = self._only_user(gate.out), self._only_user(up.out)
            if (
                active is None
                or not isinstance(active.op, Activation)
                or self._only_user(active) is not product
            ):
                continue
            if product in self.native and isinstance(product.op, Mul) and product.inputs == (active, up.out):
                self.done.update((gate.out, up.out, active, first, second))
                parts = replace(gate, out=product), replace(up, out=product)
                return Linear(first.inputs[0], parts, active.op.function)
        return None

    def _with_bias(self, part: Part) -> Part:
        user = self._only_user(part.out)
        if user is None or not isinstance(user.op, Add) or user not in self.native or part.bias is not None:
            return part
        bias = user.inputs[1]
        is_bias = (
            user.inputs[0] is part.out and isinstance(bias.op, Weight) and bias.shape == part.out.shape[-1:]
        )
        return replace(part, out=user, bias=bias) if is_bias else part

    def _with_additions(self, part: Part, at: int) -> Part:
        """With the bias and the residual that are added next, if they are known by step `at`."""
        first = part.out
        part = self._with_bias(part)
        self.done.add(first)
        user = self._only_user(part.out)
        if user is None or not isinstance(user.op, Add) or user not in self.native:
            return part
        others = [t for t in user.inputs if t is not part.out]
        if len(others) != 1 or others[0].shape != part.out.shape or isinstance(others[0].op, Weight):
            return part
        if self.order[others[0]] > at:
            return part
        self.done.add(part.out)
        return replace(part, out=user, residual=others[0])

    def _rotation_after(self, node: Tensor) -> tuple[int, Tensor]:
        """The size of the Hadamard transform that alone reads `node`, and its result; or 0 and the node itself."""
        rows = self._only_user(node)
        turned = self._only_user(rows) if rows is not None and isinstance(rows.op, Reshape) else None
        if (
            turned is None
            or turned not in self.native
            or not _is_rotation(turned)
            or turned.inputs[0] is not rows
        ):
            return 0, node
        size = turned.shape[-1]
        if node.shape[-1] % size:
            return 0, node
        self.done.add(node)
        return size, turned

    def _delay_rotation(self, store: Tensor) -> None:
        """Leave the rotation of values that nothing but a cache store reads to the store."""
        shaped = store.inputs[2]
        if not isinstance(shaped.op, Reshape) or self._only_user(shaped) is not store:
            return
        turned = shaped.inputs[0]
        if turned not in self.native or not _is_rotation(turned) or self._only_user(turned) is not shaped:
            return
        size = turned.shape[-1]
        if shaped.shape[-1] % size == 0:
            self.stored[store] = turned.inputs[0], size
            self.done.add(turned)

    def _only_user(self, tensor: Tensor) -> Tensor | None:
        users = self.users[tensor]
        return users[0] if len(users) == 1 and users[0] is not tensor else None


def _is_rotation(node: Tensor) -> bool:
    return isinstance(node.op, MatMul) and isinstance(node.inputs[1].op, Hadamard)


def is_native_collective(node: Tensor) -> bool:
    return isinstance(node.op, AllReduce | AllGather | Broadcast | Send | Receive)
