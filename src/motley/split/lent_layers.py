"""Lent layers: products of one device's layers that another device computes, in batches of many rows.

In layer mode a CPU beside a GPU has few layers, and takes most of the time of a prompt for them. Their weights are
copied to the GPU for the batch, which multiplies by them. Everything between the products of queries, keys and values
and that of attention's output stays where the layers' cache is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from motley.graph import Graph, Tensor
from motley.graph.ops import CacheInput, MatMul, Weight
from motley.graph.roles import HEADS
from motley.ownership import MIRRORED, Split, State, Word, sole_owner
from motley.split.infer import sole


@dataclass(frozen=True)
class LentLayers:
    """Batches of `min_rows` or more are multiplied by the `owner`'s weights on the `borrower`."""

    owner: int
    borrower: int
    min_rows: int


def lent_weights_of(weights: Iterable[Tensor], states: Mapping[str, State], lent: LentLayers) -> list[Tensor]:
    """The weights of the owner's layers. `states`: as the layers were placed."""
    return [
        weight
        for weight in weights
        if isinstance(weight.op, Weight)
        and weight.op.role.layer is not None
        and _owner_of(states.get(weight.name)) == lent.owner
    ]


def place_lent(
    weights: Iterable[Tensor], states: Mapping[str, State], lent: LentLayers, n_kv_heads: int
) -> dict[str, State]:
    """The states that differ in batches of many rows: norms and biases are where their input is. The cache is stated,
    too: otherwise it would follow the keys.
    """
    found: dict[str, State] = {}
    for weight in lent_weights_of(weights, states, lent):
        assert isinstance(weight.op, Weight)
        assert weight.op.role.layer is not None
        is_matrix = len(weight.shape) > 1
        found[weight.name] = Split(0, Word.of(lent.borrower, weight.shape[0])) if is_matrix else MIRRORED
        found[CacheInput.name_of(weight.op.role.layer)] = Split(0, Word.of(lent.owner, n_kv_heads))
    return found


def lent_demands(graph: Graph, states: Mapping[str, State], lent: LentLayers) -> dict[Tensor, State]:
    """Queries, keys and values go to the owner as soon as they are computed. `states`: those of `place_lent`."""
    found: dict[Tensor, State] = {}
    for node in graph.nodes:
        weight = node.inputs[1] if isinstance(node.op, MatMul) else None
        if weight is None or not isinstance(weight.op, Weight):
            continue
        role = weight.op.role
        if role.layer is None or role.group != HEADS or role.axis != 0:
            continue
        if _owner_of(states.get(CacheInput.name_of(role.layer))) == lent.owner:
            found[node] = sole(node, lent.owner)
    return found


def _owner_of(state: State | None) -> int | None:
    return sole_owner(state) if isinstance(state, Split) else None
