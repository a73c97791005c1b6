"""Split inference: the state of every tensor of an unmodified graph, and the collectives.

Nodes are visited in order. For each, the op lists its ways to run on parts; inference takes the way with the lowest
transition cost, the first of equals. After a transition a tensor is available in both states, so a residual that was
reduced once is not reduced again. Reductions are postponed: partial + partial is partial, and nothing is reduced
before an op that cannot take a partial input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from types import MappingProxyType

from motley.errors import SplitError
from motley.graph import Graph, Tensor, Way
from motley.ownership import MIRRORED, PARTIAL, Split, State, Word, sole_owner
from motley.split.collectives import Collective
from motley.split.transitions import FREE, Cost, Transition, transition_cost

_MAX_COMBINATIONS = 256  # maximum number of input-state combinations tried for one node


@dataclass(frozen=True)
class SplitGraph:
    """A graph and the states of its tensors on the devices that run it."""

    graph: Graph
    n_devices: int  # of the crew: words name these
    ways: Mapping[Tensor, Way]  # of every node; a source's way has no inputs
    transitions: tuple[Transition, ...]  # in the order in which they run
    members: tuple[int, ...]  # the devices that run the graph: "mirrored" means all of these

    def state(self, tensor: Tensor) -> State:
        """The state in which the tensor is computed."""
        return self.ways[tensor].output

    @property
    def collectives(self) -> tuple[Transition, ...]:
        """Transitions that need a collective."""
        return tuple(t for t in self.transitions if t.kind) if len(self.members) > 1 else ()


def infer(
    graph: Graph,
    n_devices: int,
    placement: Mapping[str, State],
    demands: Mapping[Tensor, State] = MappingProxyType({}),
    members: Sequence[int] | None = None,
) -> SplitGraph:
    """States of all tensors, given the states of weights and inputs by name (default: mirrored).

    `demands`: states in which all users of an activation get it, also if a cheaper state would do for the first user.
    `members`: the devices that run the graph, a group of the crew (see `nested`); default: all.
    """
    devices = tuple(range(n_devices) if members is None else members)
    known = {node.name for node in graph.nodes if not node.inputs}
    unknown = sorted(set(placement) - known)
    if unknown:
        raise SplitError("placement", [], f"{unknown[0]!r} is no weight or input of the graph")
    inference = _Inference(devices, demands)
    for node in graph.nodes:
        if node.inputs:
            inference.visit(node)
        else:
            inference.start(node, placement.get(node.name, MIRRORED))
    for output in graph.outputs:
        inference.require(output, MIRRORED, None)
    return SplitGraph(graph, n_devices, inference.ways, tuple(inference.transitions), devices)


def sole(tensor: Tensor, device: int) -> State:
    """The state of a tensor that `device` holds alone; mirrored if no axis can express that."""
    axis = next((axis for axis, size in enumerate(tensor.shape) if size), None)
    return MIRRORED if axis is None else Split(axis, Word.of(device, tensor.shape[axis]))


class _Inference:
    def __init__(self, devices: Sequence[int], demands: Mapping[Tensor, State]) -> None:
        self._devices = devices
        self._demands = dict(demands)  # those of tensors that have not been used yet
        self.ways: dict[Tensor, Way] = {}
        self.transitions: list[Transition] = []
        # Of each tensor: first the state in which it is computed, then the states after transitions.
        self._available: dict[Tensor, list[State]] = {}

    def start(self, node: Tensor, state: State) -> None:
        if isinstance(state, Split) and not (
            state.fits(node.shape) and _names_only(state.word, self._devices)
        ):
            raise SplitError(
                node.name, [state], f"is no split of {node.shape} over {len(self._devices)} devices"
            )
        self._produce(node, Way((), state))

    def visit(self, node: Tensor) -> None:
        for tensor in node.inputs:
            if (demanded := self._demands.pop(tensor, None)) is not None:
                self.require(tensor, demanded, node)
                self._available[tensor] = [demanded]
        best: tuple[Cost, Way] | None = None
        for way in self._ways(node):
            cost = self._cost(node, way)
            if cost is None:
                continue
            # At equal cost, prefer a result that is not partial: it needs no later reduction.
            if best is None or (cost, way.output == PARTIAL) < (best[0], best[1].output == PARTIAL):
                best = cost, way
            if cost == FREE and way.output != PARTIAL:  # no other way can be better
                break
        if best is None:
            states = [self.ways[t].output for t in node.inputs]
            why = f"no way to compute {node.name or 'it'} from inputs that lie like this"
            raise SplitError(node.op.name, states, why)
        for tensor, state in zip(node.inputs, best[1].inputs, strict=True):
            self.require(tensor, state, node)
        self._produce(node, best[1])

    def require(self, tensor: Tensor, target: State, user: Tensor | None) -> None:
        """Make `tensor` available in `target`, by the cheapest transition if it is not available yet."""
        available = self._available[tensor]
        if target not in available:
            found = _cheapest(tensor, available, target)
            assert found is not None, f"{tensor!r} cannot be {target}"
            self.transitions.append(Transition(tensor, found[1], target, user))
            available.append(target)

    def _ways(self, node: Tensor) -> Iterator[Way]:
        """Ways to run a node: on the one device that has all inputs; the op's own ways; mirrored on all devices.

        A message to another group of devices has only the last: the group's first device sends it (`localize`).
        """
        mirrored = Way((MIRRORED,) * len(node.inputs), MIRRORED)
        if isinstance(node.op, Collective):
            yield mirrored
            return
        combinations = self._combinations(node)
        owners = {sole_owner(state): None for states in combinations for state in states}
        for owner in owners:
            if owner is not None and sole(node, owner) != MIRRORED:
                yield Way(tuple(sole(t, owner) for t in node.inputs), sole(node, owner))
        for states in combinations:
            yield from node.op.ways(node.inputs, states)
        yield mirrored

    def _combinations(self, node: Tensor) -> list[tuple[State, ...]]:
        """Combinations of the inputs' available states. If too many: each state once, for all inputs that have it.

        A tensor that was computed mirrored counts as mirrored only: any other state of it is free, and what an earlier
        node took must not attract this one.
        """
        available = [
            [MIRRORED] if states[0] == MIRRORED else states
            for states in (self._available[t] for t in node.inputs)
        ]
        if prod(map(len, available)) <= _MAX_COMBINATIONS:
            return list(product(*available))
        known = dict.fromkeys(state for states in available for state in states)
        return [tuple(state if state in states else states[0] for states in available) for state in known]

    def _cost(self, node: Tensor, way: Way) -> Cost | None:
        total = FREE
        for tensor, target in zip(node.inputs, way.inputs, strict=True):
            found = _cheapest(tensor, self._available[tensor], target)
            if found is None:
                return None
            total += found[0]
        return total

    def _produce(self, node: Tensor, way: Way) -> None:
        self.ways[node] = way
        self._available[node] = [way.output]


def _cheapest(tensor: Tensor, available: Iterable[State], target: State) -> tuple[Cost, State] | None:
    costs = [(transition_cost(tensor, state, target), state) for state in available]
    return min(
        ((cost, state) for cost, state in costs if cost is not None), key=lambda pair: pair[0], default=None
    )


def _names_only(word: Word, devices: Iterable[int]) -> bool:
    return sum(word.count(device) for device in devices) == len(word)
