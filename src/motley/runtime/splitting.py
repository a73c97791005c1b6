"""A model's split over a crew: placement once, then each device's graph for each batch shape."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import RLock
from typing import Generic, TypeVar

from motley.gguf import ModelSpec
from motley.graph import Graph, Tensor
from motley.models import BatchShape, DecoderParams, GraphOptions, build_graph
from motley.ownership import MIRRORED
from motley.runtime.crew import Crew
from motley.split.apart import demands_of, place_apart
from motley.split.infer import SplitGraph, infer
from motley.split.lent_layers import lent_demands, place_lent
from motley.split.localize import LocalGraph, localize
from motley.split.nested import LayersOfGroups, apart_of_group, shares_of_group
from motley.split.placement import LAYER, TENSOR, Placement, choose_kv_repeat, place
from motley.split.residual import residual_demands

_MAX_KEPT = 64  # batch shapes

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class _Group:
    """Devices that split the same layers, and the placement of these layers' weights."""

    members: tuple[int, ...]
    options: GraphOptions
    placement: Placement
    is_cut: bool  # several devices have a part of each layer
    lent: Placement | None = None  # of batches for which weights are copied to another device


class ModelSplit:
    """The split of one model over one crew. Loads no weights. `share` may be called from any thread.

    A crew is one group of devices, which split the whole graph, unless the user named several (see `split.nested`).
    """

    def __init__(self, spec: ModelSpec, params: DecoderParams, crew: Crew, options: GraphOptions) -> None:
        self.spec = spec
        self.params = params
        self.crew = crew
        self._layers = LayersOfGroups(params, crew.groups, crew.shares) if crew.groups else None
        self._groups = [self._place(options, index) for index in range(len(crew.groups) or 1)]
        repeat = max(group.options.kv_repeat for group in self._groups)
        self.options = replace(options, kv_repeat=repeat)  # the most copies of a KV head in any group
        states = {name: state for group in self._groups for name, state in group.placement.states.items()}
        experts = next((g.placement.experts for g in self._groups if g.placement.experts is not None), None)
        self.placement = Placement(states, experts, crew.apart)
        self.lends = crew.borrower is not None
        self._min_lent_rows = crew.min_lent_rows
        self._graphs: _Memo[tuple[int, BatchShape], Graph] = _Memo()
        self._splits: _Memo[tuple[int, BatchShape, bool], SplitGraph] = _Memo()
        self._shares: _Memo[tuple[int, BatchShape, bool], LocalGraph] = _Memo()

    def _place(self, options: GraphOptions, index: int) -> _Group:
        """A group's placement. `options`: of a graph with each KV head once."""
        crew, params = self.crew, self.params
        members = crew.groups[index] if crew.groups else tuple(range(len(crew)))
        shares, apart = shares_of_group(crew.shares, members), apart_of_group(crew.apart, members)
        mode = TENSOR if crew.groups else crew.mode

        def own(options: GraphOptions) -> list[Tensor]:
            found = build_graph(self.spec, params, BatchShape(1, 1), options).weights
            return list(found) if self._layers is None else self._layers.own(found, index)

        weights = own(options)
        if not any(shares):  # no layers
            return _Group(members, options, Placement({}), is_cut=False)
        if mode == TENSOR:
            options = replace(options, kv_repeat=choose_kv_repeat(weights, params, shares))
            weights = own(options)
        placed = place(mode, weights, params, shares, options.kv_repeat, crew.experts, apart)
        lent = None
        if apart is not None and apart.borrower is not None:
            states = {**placed.states, **place_apart(weights, apart.lent)}
            lent = replace(placed, states=states, apart=apart.lent)
        if crew.lent is not None:
            states = {**placed.states, **place_lent(weights, placed.states, crew.lent, params.n_kv_heads)}
            lent = replace(placed, states=states)
        is_cut = mode == TENSOR and sum(share > 0 for share in shares) > 1
        return _Group(members, options, placed, is_cut=is_cut, lent=lent)

    @property
    def n_groups(self) -> int:
        return len(self._groups)

    def graph(self, batch: BatchShape) -> Graph:
        """The whole graph for a batch shape, as one device would run it."""
        return self._graph(self.options.kv_repeat, batch)

    def is_lent(self, batch: BatchShape) -> bool:
        """Whether batches of a shape are computed with weights that are copied to another device (`ExpertsApart`,
        `LentLayers`).
        """
        return self.lends and batch.n_tokens >= self._min_lent_rows

    def lent_share(self, device: int) -> LocalGraph:
        """A device's graph with all weights that it ever borrows."""
        return self.share(device, BatchShape(self.crew.min_lent_rows, 1), lends=True)

    @property
    def min_lent_rows(self) -> int | None:
        """The fewest rows of a batch that is computed with copied weights; None: no batch is."""
        return self._min_lent_rows if self.lends else None

    def lend_from(self, n_rows: int) -> None:
        """Batches of so many rows or more are computed with copied weights, not fewer than the crew says: there is
        memory for these. Call it before a plan of as many rows as the crew says is made.
        """
        self._min_lent_rows = max(n_rows, self.crew.min_lent_rows)

    def stop_lending(self) -> None:
        """From now on, no batch is computed with copied weights. Call it before the first plan is made."""
        self.lends = False

    def split(self, batch: BatchShape, group: int = 0, *, lends: bool | None = None) -> SplitGraph:
        """The graph of a group of devices for a batch shape, with the states of its tensors. `lends`: whether a device
        lends its weights for it; None: if the batch has enough rows.
        """
        is_lent = self._lends_for(batch, lends)

        def make() -> SplitGraph:
            own = self._groups[group]
            placement = own.lent if is_lent and own.lent is not None else own.placement
            graph = self._graph(own.options.kv_repeat, batch)
            if self._layers is not None:
                graph = self._layers.graph_of(graph, group)
            names = {node.name for node in graph.nodes if not node.inputs}  # fewer if fewer layers run
            states = {name: state for name, state in placement.states.items() if name in names}
            by_layers = self.crew.mode == LAYER and self._layers is None
            demands = demands_of(graph, states, placement.apart, is_cut=own.is_cut, is_by_layers=by_layers)
            if own.is_cut:
                demands = residual_demands(graph, states) | demands
            if is_lent and self.crew.lent is not None:
                demands |= lent_demands(graph, states, self.crew.lent)
            return infer(graph, len(self.crew), states, demands, own.members)

        return self._splits.get((group, batch, is_lent), make)

    def kv_repeat(self, group: int) -> int:
        """How often each KV head is stored in a group's layers."""
        return self._groups[group].options.kv_repeat

    def share(self, device: int, batch: BatchShape, *, lends: bool | None = None) -> LocalGraph:
        """One device's graph. A device alone has the whole graph: nothing is split, so that nothing is inferred.

        `lends`: see `split`.
        """
        lends = self._lends_for(batch, lends)
        key = device, batch, lends
        if len(self.crew) == 1:
            return self._shares.get(key, lambda: self._whole(batch))
        group = next(i for i, group in enumerate(self._groups) if device in group.members)
        return self._shares.get(key, lambda: localize(self.split(batch, group, lends=lends), device))

    def _lends_for(self, batch: BatchShape, lends: bool | None) -> bool:
        return self.is_lent(batch) if lends is None else lends and self.crew.borrower is not None

    def _graph(self, kv_repeat: int, batch: BatchShape) -> Graph:
        options = replace(self.options, kv_repeat=kv_repeat)
        return self._graphs.get(
            (kv_repeat, batch), lambda: build_graph(self.spec, self.params, batch, options)
        )

    def _whole(self, batch: BatchShape) -> LocalGraph:
        graph = self.graph(batch)
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
