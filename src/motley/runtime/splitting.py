"""A model's split over a crew: placement once, then each device's graph for each batch shape."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from threading import RLock
from typing import Generic, TypeVar

from motley.gguf import ModelSpec
from motley.models import BatchShape, DecoderParams, GraphOptions, build_graph
from motley.runtime.crew import Crew
from motley.split.infer import SplitGraph, infer
from motley.split.localize import LocalGraph, localize
from motley.split.placement import TENSOR, choose_kv_repeat, place

_MAX_KEPT = 64  # batch shapes

K = TypeVar("K")
V = TypeVar("V")


class ModelSplit:
    """How one model lies on one crew. Loads no weights. Any device's thread may ask for its share."""

    def __init__(self, spec: ModelSpec, params: DecoderParams, crew: Crew, options: GraphOptions) -> None:
        self.spec = spec
        self.params = params
        self.crew = crew
        smallest = BatchShape(1, 1)
        weights = build_graph(spec, params, smallest, options).weights
        repeat = choose_kv_repeat(weights, params, crew.shares) if crew.mode == TENSOR else 1
        self.options = replace(options, kv_repeat=repeat)
        weights = build_graph(spec, params, smallest, self.options).weights
        self._placement = place(crew.mode, weights, params, crew.shares, repeat)
        self._splits: _Memo[BatchShape, SplitGraph] = _Memo()
        self._shares: _Memo[tuple[int, BatchShape], LocalGraph] = _Memo()

    def split(self, batch: BatchShape) -> SplitGraph:
        """The whole graph for a batch shape, with the states of its tensors."""

        def make() -> SplitGraph:
            graph = build_graph(self.spec, self.params, batch, self.options)
            return infer(graph, len(self.crew), self._placement.states)

        return self._splits.get(batch, make)

    def share(self, device: int, batch: BatchShape) -> LocalGraph:
        """One device's graph."""
        return self._shares.get((device, batch), lambda: localize(self.split(batch), device))


class _Memo(Generic[K, V]):
    """The latest results by key, each made once however many threads ask for it."""

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
