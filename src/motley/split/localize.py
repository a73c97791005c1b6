"""One device's part of a split graph, as an ordinary graph with static shapes.

Walks the nodes in their order. A tensor that another device holds alone is absent here, and so are the nodes
that compute it. Every device has the collectives in the same order, also if other nodes are absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from motley.graph import Graph, Tensor, Way
from motley.graph.graph import in_order
from motley.graph.ops import Add, Weight
from motley.graph.roles import OUTPUT
from motley.ownership import MIRRORED, Mirrored, Partial, Split, State, sole_owner
from motley.split.collectives import (
    AllGather,
    AllReduce,
    Broadcast,
    Collective,
    Place,
    Receive,
    ReduceScatter,
    Send,
    Shard,
    Zeros,
)
from motley.split.infer import SplitGraph
from motley.split.transitions import Transition, is_fixed

_AS = " as "  # in the name of a weight whose state differs from its placement


def original_name(name: str) -> str:
    """The name in the whole graph of a local graph's weight."""
    return name.split(_AS)[0]


@dataclass(frozen=True)
class LocalGraph:
    """The graph that one device runs. Its outputs are whole, not parts."""

    graph: Graph
    layouts: Mapping[str, State]  # state of each weight, by its name in this graph


def localize(split: SplitGraph, device: int) -> LocalGraph:
    walk = _Walk(split, device)
    pending = list(split.transitions)
    for node in split.graph.nodes:
        way = split.ways[node]
        while pending and pending[0].user is node:
            walk.bring(pending.pop(0))
        walk.make(node, way)
    for transition in pending:
        walk.bring(transition)
    outputs = [walk.part(t, MIRRORED) for t in split.graph.outputs]
    assert all(outputs), "an output is absent"
    effects = [t for t in walk.made if isinstance(t.op, Collective)]
    kept = set(in_order([*effects, *(t for t in outputs if t)]))
    kept |= walk.vectors_of_exits()
    nodes = [t for t in in_order(walk.made) if t in kept]
    graph = Graph(tuple(nodes), tuple(t for t in outputs if t))
    graph.verify()
    return LocalGraph(graph, {node.name: walk.layouts[node.name] for node in graph.weights})


class _Walk:
    """Builds one device's graph node by node; keeps the parts made so far, by tensor and state."""

    def __init__(self, split: SplitGraph, device: int) -> None:
        self._split = split
        self._device = device
        self._first = split.members[0]
        self._is_alone = len(split.members) == 1
        # Of collectives: empty if all devices of the crew take part.
        self._members = split.members if len(split.members) < split.n_devices else ()
        self._parts: dict[tuple[Tensor, State], Tensor | None] = {}
        self.made: list[Tensor] = []  # in node order
        self.layouts: dict[str, State] = {}
        self._sums: list[
            Tensor
        ] = []  # of all devices: a layer's result is one, unless one device has it alone
        self._loaded: dict[tuple[Tensor, State], Tensor] = {}  # weights and cache layers

    def part(self, tensor: Tensor, state: State) -> Tensor | None:
        """This device's part of `tensor` in `state`; None if another device holds it alone."""
        return self._parts[tensor, state]

    def vectors_of_exits(self) -> set[Tensor]:
        """Norms and biases that this device needs if fewer layers run, and maybe not if all do; they are loaded in any
        case. Where another device has the last layers alone, the results of earlier ones may be on all devices.
        """
        used = set(in_order(self._sums))
        weights = {part: part.op for part in self._loaded.values() if isinstance(part.op, Weight)}
        return {
            part
            for part, op in weights.items()
            if len(part.shape) == 1 and (part in used or (self._sums and op.role.group == OUTPUT))
        }

    def make(self, node: Tensor, way: Way) -> None:
        if self._is_elsewhere(way.output):
            self._parts[node, way.output] = None
            return
        if isinstance(node.op, Collective):
            self._parts[node, way.output] = self._relay(node, way)
            return
        if is_fixed(node) and not node.inputs:
            part = self._lay_out(node, way.output)
        else:
            inputs = [self._present(t, state) for t, state in zip(node.inputs, way.inputs, strict=True)]
            shape = way.output.local_shape(node.shape, self._device)
            part = node.op.local(inputs, way, shape, self._device, node.name)
        if isinstance(node.op, Add) and isinstance(way.output, Mirrored | Partial):
            self._sums.append(part)
        self._parts[node, way.output] = part
        self.made.append(part)

    def _relay(self, node: Tensor, way: Way) -> Tensor | None:
        """A collective between groups of devices: the first device of this group sends and receives for all of them."""
        op, is_first = node.op, self._device == self._first
        inputs = [self._present(t, state) for t, state in zip(node.inputs, way.inputs, strict=True)]
        match op:
            case Send():
                made = [op(*inputs, name=node.name)] if is_first else []
            case Receive(_, _, size, kind) if not self._is_alone:
                here = [op(name=f"{node.name} here" if node.name else "")] if is_first else []
                made = [
                    *here,
                    Broadcast(self._first, size, kind, members=self._members)(*here, name=node.name),
                ]
            case Receive():
                made = [op(name=node.name)]
            case Broadcast(root):
                made = [op(*(inputs if self._device == root else []), name=node.name)]
            case _:
                raise AssertionError(f"{op.name} is no collective between groups")
        self.made.extend(made)
        if isinstance(op, Receive):
            self._sums.append(made[-1])  # of an earlier group's layers, on all devices of this one
        return made[-1] if made else None

    def bring(self, transition: Transition) -> None:
        """Make the tensor's part in the transition's target state."""
        tensor, source, target = transition.tensor, transition.source, transition.target
        key = tensor, target
        if not is_fixed(tensor):
            part = self._transit(tensor, source, target)
        elif self._is_elsewhere(target):
            part = None
        else:
            part = self._lay_out(tensor, target)
        self._parts[key] = part
        if part is not None:
            self.made.append(part)

    def _lay_out(self, tensor: Tensor, state: State) -> Tensor:
        """This device's part of a weight or cache layer, which is loaded in this state and not split at run time.

        A weight that is placed mirrored and read by this device alone is loaded once, as one that is mirrored: which
        devices read it depends on the batch, as fewer layers may run.
        """
        placed = self._split.state(tensor)
        if isinstance(tensor.op, Weight) and placed == MIRRORED and sole_owner(state) == self._device:
            state = MIRRORED
        if (tensor, state) not in self._loaded:
            shape = state.local_shape(tensor.shape, self._device)
            is_as_placed = state == placed or not isinstance(tensor.op, Weight)
            name = tensor.name if is_as_placed else f"{tensor.name}{_AS}{state}"
            self.layouts[name] = state
            self._loaded[tensor, state] = tensor.op.local([], Way((), state), shape, self._device, name)
        return self._loaded[tensor, state]

    def _transit(self, tensor: Tensor, source: State, target: State) -> Tensor | None:
        here, device = self._parts[tensor, source], self._device
        name = f"{tensor.name}→{target}" if tensor.name else ""
        owner, new_owner = sole_owner(source), sole_owner(target)
        if isinstance(source, Mirrored):
            return self._cut(here, target, name)
        if (owner is not None and owner == new_owner) or self._is_alone:
            return here
        match source, target:
            case Partial(), Mirrored():
                return AllReduce(members=self._members)(_some(here), name=name)
            case Partial(), Split(axis, word):
                scatter = ReduceScatter(axis, word, device, members=self._members)
                return self._unless_empty(scatter(_some(here), name=name), target)
            case Split(axis, word), Partial():
                return Place(axis, word, device)(self._present(tensor, source), name=name)
            case Split(), Mirrored() if owner is not None:
                broadcast = Broadcast(owner, tensor.shape, tensor.dtype, members=self._members)
                return broadcast(*([here] if here else []), name=name)
            case Split(), Split() if owner is not None and new_owner is not None:
                return self._hand_over(tensor, here, owner, new_owner, name)
            case Split(axis, word), _:
                whole = AllGather(axis, word, members=self._members)(self._present(tensor, source), name=name)
                self.made.append(whole)
                return self._cut(whole, target, name)
        raise AssertionError(f"no transition from {source} to {target}")

    def _cut(self, whole: Tensor | None, target: State, name: str) -> Tensor | None:
        """This device's part in `target` of a whole tensor, without communication."""
        whole = _some(whole)
        if self._is_elsewhere(target):
            return None
        match target:
            case Split(axis, word) if sole_owner(target) is None:
                return Shard(axis, word, self._device)(whole, name=name)
            case Partial() if self._device != self._first:
                return Zeros(whole.shape)(name=name)
        return whole

    def _hand_over(
        self, tensor: Tensor, here: Tensor | None, owner: int, new_owner: int, name: str
    ) -> Tensor | None:
        if self._device == owner:
            self.made.append(Send(owner, new_owner)(_some(here), name=name))
        return (
            Receive(owner, new_owner, tensor.shape, tensor.dtype)(name=name)
            if self._device == new_owner
            else None
        )

    def _unless_empty(self, part: Tensor, target: State) -> Tensor | None:
        """`part`, or None if another device holds `target` alone. The collective runs here in both cases."""
        self.made.append(part)
        return None if self._is_elsewhere(target) else part

    def _present(self, tensor: Tensor, state: State) -> Tensor:
        """This device's part, or an empty tensor if another device holds the tensor alone."""
        part = self._parts[tensor, state]
        if part is not None:
            return part
        if is_fixed(tensor):
            return self._lay_out(tensor, state)
        return Zeros(state.local_shape(tensor.shape, self._device), tensor.dtype)()

    def _is_elsewhere(self, state: State) -> bool:
        owner = sole_owner(state)
        return owner is not None and owner != self._device


def _some(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a tensor that every device holds is absent here"
    return tensor
