"""From one device's graph to stages: the rules of `rules.py`, tried node by node, each stage only if it is allowed.

A stage is allowed if

- it makes each of its outputs once, and no other stage computes any of its nodes yet,
- nothing outside of it reads a node inside of it (other than its outputs),
- there is a place for it in the order of nodes: behind its inputs, and not behind any of its outputs,
- some kernel of the backend takes it.

Rules only describe patterns; these four are checked here, for all of them. Nodes that no rule covers are stages by
themselves. The order of nodes is kept, so every device runs its collectives in the order of its graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from motley.graph import CACHE, Graph, Tensor
from motley.graph.ops import Input, Weight
from motley.plan.stages import Single, Stage

Takes = Callable[[Stage], bool]
"""Whether the backend has a kernel for a stage. Depends on nothing but the stage."""


def is_given(tensor: Tensor) -> bool:
    """Whether it is there before the first stage: an input, a weight or a constant."""
    return isinstance(tensor.op, Input | Weight) or tensor.op.is_constant


def is_view(tensor: Tensor) -> bool:
    """Whether it is nothing but another shape of its input. A cache store is a view of its cache but does work."""
    return tensor.op.is_view and tensor.dtype != CACHE


def without_views(tensor: Tensor) -> Tensor:
    """The tensor that `tensor` is a view of, or itself."""
    while is_view(tensor):
        tensor = tensor.inputs[0]
    return tensor


class Fusion:
    """A graph on its way to stages: what rules ask, and what they have found so far."""

    def __init__(self, graph: Graph, takes: Takes) -> None:
        self._graph = graph
        self._takes = takes
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self.users: dict[Tensor, list[Tensor]] = defaultdict(list)  # nodes that read a tensor, views included
        self._readers: dict[Tensor, list[Tensor | None]] = defaultdict(list)  # through views; None: an output
        for node in graph.nodes:
            for tensor in node.inputs:
                self.users[tensor].append(node)
                if not is_view(node):
                    self._readers[without_views(tensor)].append(node)
        for tensor in graph.outputs:
            self._readers[without_views(tensor)].append(None)
        self._stages: dict[Tensor, Stage] = {}  # of each node that a stage computes
        self._at: dict[int, Stage] = {}  # by place in the order of nodes

    def only_user(self, tensor: Tensor) -> Tensor | None:
        """The node, which may be a view, that alone has `tensor` among its inputs."""
        users = self.users[tensor]
        return users[0] if len(users) == 1 else None

    def only_reader(self, tensor: Tensor) -> Tensor | None:
        """The node that alone reads `tensor`, as it is or as a view."""
        readers = self._readers[tensor]
        return readers[0] if len(readers) == 1 else None

    def is_free(self, node: Tensor) -> bool:
        return node not in self._stages

    def allows(self, stage: Stage) -> bool:
        return self._place(stage, _inside(stage)) is not None and self._takes(stage)

    def run(self, rules: Iterable[Callable[[Fusion, Tensor], Iterator[Stage]]]) -> tuple[Stage, ...]:
        """All stages, in an order in which they can run."""
        nodes = [node for node in self._graph.nodes if not (is_given(node) or is_view(node))]
        for rule in rules:
            for node in nodes:
                if self.is_free(node):
                    found = next((stage for stage in rule(self, node) if self.allows(stage)), None)
                    if found is not None:
                        self._add(found)
        for node in nodes:
            if self.is_free(node):
                self._add(Single.of(node))
        return tuple(self._at[i] for i in sorted(self._at))

    def _add(self, stage: Stage) -> None:
        inside = _inside(stage)
        at = self._place(stage, inside)
        assert at is not None, stage
        self._stages |= dict.fromkeys(inside, stage)
        self._at[at] = stage

    def _place(self, stage: Stage, inside: set[Tensor]) -> int | None:
        """The first place among the stage's own nodes where its inputs are known; None: it is not allowed."""
        outputs = set(stage.outputs)
        hidden = inside - outputs
        if len(outputs) < len(stage.outputs) or any(node in self._stages for node in inside):
            return None
        if any(reader not in inside for node in hidden for reader in self._readers[node]):
            return None
        read = (without_views(tensor) for tensor in stage.inputs)
        known = max((self._order[tensor] for tensor in read if not is_given(tensor)), default=-1)
        at = min((self._order[node] for node in inside if self._order[node] > known), default=None)
        return at if at is not None and all(at <= self._order[out] for out in outputs) else None


def _inside(stage: Stage) -> set[Tensor]:
    """The nodes that a stage computes: all between its inputs and its outputs, without views."""
    limits, inside = set(stage.inputs), set[Tensor]()
    waiting = list(stage.outputs)
    while waiting:
        tensor = waiting.pop()
        if tensor in limits or tensor in inside or is_given(tensor):
            continue
        if not is_view(tensor):
            inside.add(tensor)
        waiting.extend(tensor.inputs)
    return inside
