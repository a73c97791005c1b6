"""A runner without weights, which records a model's kernels while its weights are still being read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

from motley.backends import Backend
from motley.graph import Graph, Tensor
from motley.models import BatchShape
from motley.runtime.caching import CachePlan
from motley.runtime.runner import Runner
from motley.runtime.splitting import ModelSplit

_FEW_BLOCKS = 16  # of a cache that is never written to


def stand_in_runner(
    split: ModelSplit, backends: Sequence[Backend], cache: CachePlan, max_bytes: int | None
) -> Runner | None:
    """A runner whose batches may only be recorded; None: some backend has no stand-in. `max_bytes`: of a device's
    memory that it may take beside its part of the activations.
    """
    twins = [twin for backend in backends if (twin := backend.stand_in(max_bytes)) is not None]
    if len(twins) < len(backends):
        return None
    return Runner(split, twins, _small(cache), has_stand_ins=True)


def layers_to_record(split: ModelSplit) -> int:
    """How many of the first layers have all kernels of the model: those after them repeat them. 0: all are needed.

    Of a model on several devices, which may have layers of their own, all.
    """
    if len(split.crew) > 1:
        return 0
    whole, n_layers = _kinds(split.share(0, BatchShape(1, 1)).graph), 1
    while n_layers < split.params.n_layers:
        if whole <= _kinds(split.share(0, BatchShape(1, 1, n_layers=n_layers)).graph):
            return n_layers
        n_layers *= 2
    return 0


def _kinds(graph: Graph) -> set[Hashable]:
    """The nodes of a graph as far as their kernels depend on it: each with its inputs and with the nodes that read it,
    which may become one stage with it.
    """
    readers: dict[Tensor, Counter[Hashable]] = {}
    for node in graph.nodes:
        for tensor in dict.fromkeys(node.inputs):
            readers.setdefault(tensor, Counter())[_kind(node)] += 1
    return {
        (_kind(node), frozenset(readers.get(node, Counter()).items())) for node in graph.nodes if node.inputs
    }


def _kind(node: Tensor) -> Hashable:
    """An op with the shapes and types of its inputs; of weights and other inputs of the graph, only these."""
    inputs = tuple((each.shape, each.dtype, bool(each.inputs)) for each in node.inputs)
    return (node.op, node.shape, node.dtype, inputs)


def _small(cache: CachePlan) -> CachePlan:
    """The same layout with a few blocks."""
    groups = tuple(replace(group, n_blocks=min(group.n_blocks, _FEW_BLOCKS)) for group in cache.groups)
    states = cache.states and replace(cache.states, n_slots=2, n_rings=2)
    return replace(cache, config=replace(cache.config, demand_paged=False), groups=groups, states=states)
