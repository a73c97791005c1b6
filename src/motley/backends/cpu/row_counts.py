"""Which tensors are stored row after row, so that a plan serves batches with fewer rows than it was made for.

A plan is made for a number of tokens and of outputs (a bucket, see `Backend.bucket`). A tensor is *by rows* if its
values are equal pieces, one for each token (or output) in order, none of which depends on another row but through the
cache. A batch of fewer rows then is the same computation on the first pieces, and kernels are told how many there are
(csrc/row_counts.hpp). What is not by rows is computed for all rows that the plan was made for; what comes out for those
that the batch does not have is never read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from motley.graph import Graph, Op, Tensor
from motley.graph.ops import (
    Activation,
    Add,
    Attention,
    CacheStore,
    CausalConv,
    Concat,
    DeltaNet,
    ExpertFfn,
    GetRows,
    LocalIds,
    MatMul,
    Mul,
    Permute,
    Repeat,
    Reshape,
    RmsNorm,
    Rope,
    Route,
    RouteWeights,
    Scale,
    Slice,
    Softmax,
    Weight,
)
from motley.plan import Linear, Norm, Single, Stage
from motley.split.collectives import AllGather, AllReduce, Broadcast, Place, Receive, ReduceScatter, Shard

TOKENS, OUTPUTS = 1, 2  # as csrc/row_counts.hpp counts kinds of rows; 0: all that there are
INPUT_KINDS = {
    "tokens": TOKENS,
    "positions": TOKENS,
    "n_expert_used": TOKENS,
    "hidden": TOKENS,
    "output_rows": OUTPUTS,
}


@dataclass(frozen=True)
class Rows:
    """What one row of a tensor is, and for how many rows the plan was made."""

    kind: int
    n_planned: int

    def of(self, value: torch.Tensor, n_actual: int) -> torch.Tensor:
        """The part of a tensor that belongs to the first rows; all of it where rows are not its first axis."""
        per_row, rest = divmod(len(value), self.n_planned)
        return value if rest else value[: per_row * n_actual]


ALL_ROWS = Rows(0, 1)
Known = Mapping[Tensor, Rows]


def rows_of_tensors(graph: Graph) -> dict[Tensor, Rows]:
    """The rows of each node that is by rows."""
    known: dict[Tensor, Rows] = {
        node: Rows(INPUT_KINDS[node.name], node.shape[0])
        for node in graph.inputs
        if node.name in INPUT_KINDS and node.shape[0]
    }
    given = sorted(set(known.values()), key=lambda rows: rows.kind)
    for node in graph.nodes:
        rule = _RULES.get(type(node.op))
        rows = rule(node, known) if rule is not None else None
        if rows is None and isinstance(node.op, AllReduce | Receive | Broadcast):
            # Other devices' activations, where this one adds none: of tokens, or of outputs. There are never more
            # outputs than tokens, so where the plan has as many of both, tokens will do.
            rows = next((rows for rows in given if node.shape[0] == rows.n_planned), None)
        if rows is not None:
            known[node] = rows
    return known


def rows_of_stage(stage: Stage, known: Known) -> Rows:
    """The rows that a stage's kernels work on."""
    match stage:
        case Linear(x=x) | Norm(x=x):
            rows = known.get(x)
        case Single(node=node) if isinstance(node.op, CacheStore):
            rows = known.get(stage.inputs[1])
            assert rows is not None or not known, (
                "keys that are not by rows cannot be stored for a part of them"
            )
        case Single(node=node):
            rows = known.get(node)
        case _:
            rows = None
    return rows or ALL_ROWS


def _is_fixed(x: Tensor) -> bool:
    return isinstance(x.op, Weight) or x.op.is_constant


def _as_first(node: Tensor, known: Known) -> Rows | None:
    return known.get(node.inputs[0])


def _as_second(node: Tensor, known: Known) -> Rows | None:
    return known.get(node.inputs[1])


def _product(node: Tensor, known: Known) -> Rows | None:
    """x · Wᵀ row by row, if W is the same for all."""
    x, weight = node.inputs
    return known.get(x) if _is_fixed(weight) else None


def _binary(node: Tensor, known: Known) -> Rows | None:
    """The rows of both inputs, or of the input that is not the same for all batches."""
    rows = {known.get(x) for x in node.inputs if not _is_fixed(x)}
    return rows.pop() if len(rows) == 1 else None


def _inside(axis_of: Callable[[Op], int]) -> Callable[[Tensor, Known], Rows | None]:
    """The rows of ops along one axis: those of all inputs, if it is not the axis of rows."""

    def rule(node: Tensor, known: Known) -> Rows | None:
        rows = {known.get(x) for x in node.inputs}
        first = rows.pop()
        is_apart = axis_of(node.op) > 0 and all(
            first and x.shape[0] % first.n_planned == 0 for x in node.inputs
        )
        return first if not rows and is_apart else None

    return rule


def _permuted(node: Tensor, known: Known) -> Rows | None:
    assert isinstance(node.op, Permute)
    rows = known.get(node.inputs[0])
    return rows if rows and node.op.axes[0] == 0 and node.shape[0] % rows.n_planned == 0 else None


def _scattered(node: Tensor, known: Known) -> Rows | None:
    """A sum by columns, or all of its rows on this device: where one device alone needs the sum."""
    rows = known.get(node.inputs[0])
    return rows if _axis(node.op) == 0 and node.shape == node.inputs[0].shape else _inside(_axis)(node, known)


def _axis(op: Op) -> int:
    assert isinstance(op, Slice | Concat | Repeat | AllGather | ReduceScatter | Shard | Place)
    return op.axis


_RULES: dict[type[Op], Callable[[Tensor, Known], Rows | None]] = {
    GetRows: _as_second,
    MatMul: _product,
    Add: _binary,
    Mul: _binary,
    Permute: _permuted,
    **{kind: _inside(_axis) for kind in (Slice, Concat, Repeat, AllGather, Shard, Place)},
    ReduceScatter: _scattered,
    **dict.fromkeys(
        (Activation, AllReduce, Attention, LocalIds, Reshape, RmsNorm, Rope, Scale, Softmax), _as_first
    ),
    **dict.fromkeys((Route, RouteWeights, ExpertFfn, CausalConv, DeltaNet), _as_first),
}
