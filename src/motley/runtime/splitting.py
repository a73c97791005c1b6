"""A model's split over a crew: placement once, then each device's graph for each batch shape."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from threading import RLock
from typing import Generic, TypeVar

from motley.gguf import ModelSpec
from motley.models import BatchShape, DecoderParams, GraphOptions, build_graph
from motley.ownership import MIRRORED
from motley.runtime.crew import Crew
from motley.split.apart import demands_of
from motley.split.infer import SplitGraph, infer
from motley.split.localize import LocalGraph, localize
from motley.split.placement import TENSOR, choose_kv_repeat, place

_MAX_KEPT = 64  # batch shapes

K = TypeVar("K")
V = TypeVar("V")


class ModelSplit:
    """The split of one model over one crew. Loads no weights. `share` may be called from any thread."""

    def __init__(self, spec: ModelSpec, params: DecoderParams, crew: Crew, options: GraphOptions) -> None:
        self.spec = spec
        self.params = params
        self.crew = crew
        smallest = BatchShape(1, 1)
        weights = build_graph(spec, params, smallest, options).weights
        repeat = choose_kv_repeat(weights, params, crew.shares) if crew.mode == TENSOR else 1
        self.options = replace(options, kv_repeat=repeat)
        weights = build_graph(spec, params, smallest, self.options).weights
        self.placement = place(crew.mode, weights, params, crew.shares, repeat, crew.experts, crew.apart)
        self._splits: _Memo[BatchShape, SplitGraph] = _Memo()
        self._shares: _Memo[tuple[int, BatchShape], LocalGraph] = _Memo()

    def split(self, batch: BatchShape) -> SplitGraph:
        """The whole graph for a batch shape, with the states of its tensors."""

        def make() -> SplitGraph:
            graph = build_graph(self.spec, self.params, batch, self.options)
            names = {node.name for node in graph.nodes if not node.inputs}  # fewer if fewer layers run
            states = {name: state for name, state in self.placement.states.items() if name in names}
            is_cut = self.crew.mode == TENSOR and sum(share > 0 for share in self.crew.shares) > 1
            demands = demands_of(graph, states, self.crew.apart, is_cut=is_cut)
            return infer(graph, len(self.crew), states, demands)

        return self._splits.get(batch, make)

    def share(self, device: int, batch: BatchShape) -> LocalGraph:
        """One device's graph. A device alone has the whole graph: nothing is split, so that nothing is inferred."""
        make = self._whole if len(self.crew) == 1 else lambda batch: localize(self.split(batch), device)
        return self._shares.get((device, batch), lambda: make(batch))

    def _whole(self, batch: BatchShape) -> LocalGraph:
        graph = build_graph(self.spec, self.params, batch, self.options)
        states = self.placement.states
        return LocalGraph(graph, {node.name: states.get(node.name, MIRRORED) for node in graph.weights})


class _Memo(Generic[K, V]):
    """The latest results by key. Each is computed once, even if several threads request it at the same time."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._found: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[], V]) -> V:
        with self._lock:
            if key not in self._found:
                self._found[key] = make()
                while len(self._found) > _MAX_KEPT:
                    self._found.popitem(last=False)
            return self._found[key]
