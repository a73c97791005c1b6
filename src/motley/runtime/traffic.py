"""Bytes that one decoded token reads: weights, and keys and values of its context. They bound the speed of decoding."""

from __future__ import annotations

from dataclasses import replace

from motley.graph import Graph, Tensor
from motley.graph.ops import ExpertFfn
from motley.models import BatchShape, build_graph
from motley.runtime.caching import CachePlan
from motley.runtime.loading import lookup_tables, packed_bytes
from motley.runtime.splitting import ModelSplit


def token_bytes(
    split: ModelSplit, plan: CachePlan, n_context: float = 0, *, n_experts: int = 0, n_layers: int = 0
) -> int:
    """Bytes that one token reads after `n_context` tokens, over all devices.

    `n_experts` of a token and the first `n_layers` layers are used; 0: as the file says.
    """
    options = replace(split.options, kv_repeat=1)  # a repeated KV head is one matrix in the file
    graph = build_graph(split.spec, split.params, BatchShape(1, 1, n_layers, n_experts), options)
    return weight_bytes(graph) + cache_bytes(plan, n_context, n_layers or split.params.n_layers)


def weight_bytes(graph: Graph) -> int:
    """Bytes of weights that a graph for one token reads: one row of each lookup table, and of a layer's experts
    only those that the token uses.
    """
    n_used: dict[Tensor, int] = {}
    for node in graph.nodes:
        if isinstance(node.op, ExpertFfn):
            n_used |= dict.fromkeys(node.inputs[3:], node.inputs[1].shape[1])
    n_used |= dict.fromkeys(lookup_tables(graph), 1)
    return sum(
        packed_bytes(weight) // weight.shape[0] * n_used[weight] if weight in n_used else packed_bytes(weight)
        for weight in graph.weights
    )


def cache_bytes(plan: CachePlan, n_context: float, n_layers: int) -> int:
    """Bytes of K and V of the first `n_layers` layers, as allocated; layers with a window read at most their window."""
    per_head = sum(kind.head_bytes(plan.head_dim) for kind in (plan.config.k_type, plan.config.v_type))
    n_read = sum(
        min(n_context, group.window or n_context) * sum(heads.get(layer, 0) for heads in plan.heads)
        for group in plan.groups
        for layer in group.layers
        if layer < n_layers
    )
    return int(n_read * per_head)
