"""From a device's graph to stages: the steps that the kernels can take together.

A stage covers one or several nodes. What the matchers below do not know runs by the op's reference, on the device.

    Embed      rows of a packed table
    Norm       RmsNorm, of chosen rows where a GetRows leads into it
    Linear     products of one input with one or several packed matrices, plus a residual
    Gate       activation(gate) · up
    Attend     rope, rotation, cache and attention, up to the rotation back
    Choose     rows of an activation
    Single     any other node
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from motley.backends.cuda.kernels.gate import FUNCTIONS
from motley.backends.cuda.planes import BLOCK
from motley.errors import PlanError
from motley.graph import Graph, Tensor
from motley.graph.ops import (
    Activation,
    Add,
    Attention,
    GetRows,
    Hadamard,
    Input,
    MatMul,
    Mul,
    Reshape,
    RmsNorm,
    Rope,
    Weight,
)


@dataclass(frozen=True)
class Stage:
    """`outputs` are the nodes whose values it makes, `inputs` those it reads."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Embed(Stage):
    """inputs: table, ids"""


@dataclass(frozen=True)
class Norm(Stage):
    """inputs: x, weight, and the rows' ids where only some are normed"""

    eps: float


@dataclass(frozen=True)
class Linear(Stage):
    """inputs: x, the weights; then the residual, where there is one"""

    n_weights: int


@dataclass(frozen=True)
class Gate(Stage):
    """inputs: gate, up"""

    function: str


@dataclass(frozen=True)
class Attend(Stage):
    """inputs: q, k, v (tokens, heads, dim) before rope; positions; cache; divisors of frequencies where there are"""

    rope: Rope
    attention: Attention
    rotates_k: bool
    rotates_v: bool
    turn: int  # dims that are rotated together: a head's, or a power of two that divides them


@dataclass(frozen=True)
class Choose(Stage):
    """inputs: rows, ids (of -1: zeros)"""


@dataclass(frozen=True)
class Single(Stage):
    """inputs: the node's"""


class Lowering:
    """Matches a graph once, from its end to its beginning, so that the largest pattern at a node comes first."""

    def __init__(self, graph: Graph) -> None:
        self._users: dict[Tensor, list[Tensor]] = defaultdict(list)
        for node in graph.nodes:
            for tensor in node.inputs:
                self._users[tensor].append(node)
        for tensor in graph.outputs:
            self._users[tensor].append(tensor)  # somebody outside reads it
        self._covered: set[Tensor] = set()
        self._by_node: dict[Tensor, Stage] = {}
        for node in reversed(graph.nodes):
            is_given = isinstance(node.op, Input | Weight) or node.op.is_constant
            if not is_given and node not in self._covered:
                self._add(self._match(node), node)
        ordered = dict.fromkeys(self._by_node[node] for node in graph.nodes if node in self._by_node)
        self.stages = tuple(_join_products(list(ordered), graph))

    def _add(self, stage: Stage, node: Tensor) -> None:
        self._covered.update(stage.outputs)
        self._by_node[node] = stage

    def _only_user(self, node: Tensor) -> Tensor | None:
        users = self._users[node]
        return users[0] if len(users) == 1 and users[0] is not node else None

    def _cover(self, *nodes: Tensor) -> bool:
        """Take inner nodes into a stage, if nobody else reads them."""
        if all(len(self._users[node]) == 1 for node in nodes):
            self._covered.update(nodes)
            return True
        return False

    def _match(self, node: Tensor) -> Stage:
        op = node.op
        if isinstance(op, GetRows) and isinstance(node.inputs[0].op, Weight):
            return Embed(node.inputs, (node,))
        if isinstance(op, GetRows):
            return Choose(node.inputs, (node,))
        if isinstance(op, RmsNorm) and _is_norm_of_rows(node):
            return self._norm(node, op)
        if isinstance(op, Add):
            for product, other in (node.inputs, node.inputs[::-1]):
                if _is_product(product) and other.shape == node.shape and self._cover(product):
                    return Linear((*product.inputs, other), (node,), 1)
        if _is_product(node):
            return Linear(node.inputs, (node,), 1)
        if isinstance(op, Mul) and _is_gated_pair(*node.inputs):
            gate, up = node.inputs
            if isinstance(gate.op, Activation) and self._cover(gate):
                return Gate((gate.inputs[0], up), (node,), gate.op.function)
        if isinstance(op, Reshape) and len(node.shape) == 2 and len(node.inputs[0].shape) == 3:
            attended = node.inputs[0]
            rotated = _rotated(attended)
            attention = attended if rotated is None else rotated
            if isinstance(attention.op, Attention):
                return self._attend(node, attention, attention.op, turned=rotated is not None)
        return Single(node.inputs, (node,))

    def _norm(self, node: Tensor, op: RmsNorm) -> Stage:
        x, weight = node.inputs
        is_chosen = isinstance(x.op, GetRows) and not isinstance(x.inputs[0].op, Weight)
        if is_chosen and isinstance(x.inputs[1].op, Input) and self._cover(x):  # other ids may be -1
            return Norm((x.inputs[0], weight, x.inputs[1]), (node,), op.eps)
        return Norm((x, weight), (node,), op.eps)

    def _attend(self, out: Tensor, node: Tensor, op: Attention, *, turned: bool) -> Stage:
        """The whole neighbourhood of an attention node, up to the rows (tokens, heads · dim) that leave it."""
        if turned:
            rotation = out.inputs[0]
            self._covered.update((rotation, rotation.inputs[0], rotation.inputs[0].inputs[0]))
        q, stored = node.inputs
        cache, k, v = stored.inputs
        turns = {_turn(tensor) for tensor in (q, k, v)} - {0}
        (q, turned_q), (k, turned_k), (v, turned_v) = (self._unrotated(tensor) for tensor in (q, k, v))
        is_known = (
            isinstance(q.op, Rope)
            and q.op == k.op
            and q.inputs[1:] == k.inputs[1:]
            and turned_q == turned_k
            and turned_v == turned
            and len(turns) <= 1
            and all(len(self._users[tensor]) == 1 for tensor in (q, k, stored, node))
        )
        if not is_known or not isinstance(q.op, Rope):
            raise PlanError(f"cuda: attention at {node.name!r} is of a kind that has no kernel")
        self._covered.update((q, k, stored, node))
        x_q, positions, *divisors = q.inputs
        inputs = x_q, k.inputs[0], v, positions, cache, *divisors
        return Attend(inputs, (out,), q.op, op, turned_k, turned_v, turns.pop() if turns else 0)

    def _unrotated(self, tensor: Tensor) -> tuple[Tensor, bool]:
        source = _rotated(tensor)
        if source is None:
            return tensor, False
        self._covered.update((tensor, tensor.inputs[0], tensor.inputs[0].inputs[0]))
        return source, True


def _is_norm_of_rows(node: Tensor) -> bool:
    weights = node.inputs[1:]
    is_weighted = len(weights) == 1 and isinstance(weights[0].op, Weight)
    return is_weighted and len(node.shape) == 2 and node.shape[1] % BLOCK == 0


def _is_gated_pair(gate: Tensor, up: Tensor) -> bool:
    is_known = isinstance(gate.op, Activation) and gate.op.function in FUNCTIONS
    return is_known and gate.shape == up.shape and len(up.shape) == 2


def _is_product(node: Tensor) -> bool:
    return isinstance(node.op, MatMul) and isinstance(node.inputs[1].op, Weight) and len(node.shape) == 2


def _rotated(node: Tensor) -> Tensor | None:
    """x, if `node` is x with each head, or each run of it, turned by a Hadamard matrix."""
    if not isinstance(node.op, Reshape) or not isinstance(node.inputs[0].op, MatMul):
        return None
    rows, matrix = node.inputs[0].inputs
    if not (isinstance(matrix.op, Hadamard) and isinstance(rows.op, Reshape)):
        return None
    source = rows.inputs[0]
    is_whole = (
        source.shape == node.shape and len(source.shape) == 3 and source.shape[2] % matrix.shape[0] == 0
    )
    return source if is_whole else None


def _turn(node: Tensor) -> int:
    """The size of the rotation that made `node`; 0 if none did."""
    return 0 if _rotated(node) is None else node.inputs[0].inputs[1].shape[0]


def _join_products(stages: Sequence[Stage], graph: Graph) -> list[Stage]:
    """Products of the same input with matrices of the same format, and without residuals, become one."""
    groups: dict[tuple[Tensor, str], list[Stage]] = defaultdict(list)
    for stage in stages:
        if isinstance(stage, Linear) and len(stage.inputs) == 2:
            groups[stage.inputs[0], stage.inputs[1].dtype].append(stage)
    joined: dict[Stage, Stage | None] = {}
    for (x, _), parts in groups.items():
        if len(parts) > 1:
            weights = tuple(part.inputs[1] for part in parts)
            outputs = tuple(part.outputs[0] for part in parts)
            joined |= dict.fromkeys(parts)
            joined[parts[0]] = Linear((x, *weights), outputs, len(parts))
    result = (joined.get(stage, stage) for stage in stages)
    return [stage for stage in result if stage is not None]
