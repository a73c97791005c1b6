"""A model's split over a crew: placement once, then each device's graph for each batch shape."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from motley.gguf import ModelSpec
from motley.models import BatchShape, DecoderParams, GraphOptions, build_graph
from motley.runtime.crew import Crew
from motley.split.infer import SplitGraph, infer
from motley.split.localize import LocalGraph, localize
from motley.split.placement import TENSOR, choose_kv_repeat, place

_MAX_SPLITS = 64  # batch shapes whose split is kept


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
        self._splits: OrderedDict[BatchShape, SplitGraph] = OrderedDict()

    def split(self, batch: BatchShape) -> SplitGraph:
        """The whole graph for a batch shape, with the states of its tensors."""
        found = self._splits.get(batch)
        if found is None:
            graph = build_graph(self.spec, self.params, batch, self.options)
            found = self._splits[batch] = infer(graph, len(self.crew), self._placement.states)
            while len(self._splits) > _MAX_SPLITS:
                self._splits.popitem(last=False)
        return found

    def share(self, device: int, batch: BatchShape) -> LocalGraph:
        """One device's graph."""
        return localize(self.split(batch), device)
