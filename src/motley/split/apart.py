"""Experts apart: routed experts on other devices than the rest of their layer.

Most bytes of a mixture of experts are experts, of which a token reads few. So a device with little memory and much
bandwidth (a GPU) can have attention, cache, shared experts and output, while another one (the CPU) has the routed
experts of some layers. The states of their weights say so; inference does the rest:

    experts of one device      its router is there, too: x is sent, the result is sent back
    experts of several         x is mirrored, every device routes for itself, and the results are summed up
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from motley.graph import Graph, Tensor
from motley.graph.ops import ExpertFfn, Weight
from motley.graph.roles import EXPERTS, ROUTER, SHARED_FFN
from motley.ownership import MIRRORED, PARTIAL, Split, State, Word, sole_owner
from motley.split.apportion import Apportioner


@dataclass(frozen=True)
class ExpertsApart:
    """The routed experts of the first `n_layers` layers are shared out by `shares`, as whole experts.

    `n_layers` None: as few layers as the devices' memory allows (see `runtime.expert_fitting`).

    With a `borrower`, batches of `min_rows` or more are computed there, with weights that are copied layer by layer:
    every expert is used, so that copying them once costs less than many rows on the other device.
    """

    n_layers: int | None
    shares: tuple[Fraction, ...]
    borrower: int | None = None
    min_rows: int = 0

    @property
    def lent(self) -> ExpertsApart:
        """The same experts, all of them on the borrower."""
        return replace(self, shares=tuple(Fraction(d == self.borrower) for d in range(len(self.shares))))

    @property
    def owner(self) -> int | None:
        """The device that has all of these experts; None if several share them."""
        owners = [device for device, share in enumerate(self.shares) if share]
        return owners[0] if len(owners) == 1 else None


def is_apart(weight: Tensor, apart: ExpertsApart | None) -> bool:
    """Whether `apart` decides about this weight."""
    assert isinstance(weight.op, Weight)
    role = weight.op.role
    n_layers = 0 if apart is None else apart.n_layers
    assert n_layers is not None, "the number of layers was settled before anything is placed"
    return role.group in (EXPERTS, ROUTER) and role.layer is not None and role.layer < n_layers


def place_apart(weights: Sequence[Tensor], apart: ExpertsApart) -> dict[str, State]:
    """The states of the weights that `apart` decides about. Routers of experts that are shared stay mirrored."""
    states: dict[str, State] = {}
    by_layer: dict[int, list[Tensor]] = {}
    for weight in weights:
        assert isinstance(weight.op, Weight)
        if is_apart(weight, apart) and weight.op.role.layer is not None:
            by_layer.setdefault(weight.op.role.layer, []).append(weight)
    apportioner = Apportioner(apart.shares)  # one for all layers, so that rounding errors do not add up
    for _, group in sorted(by_layer.items()):
        experts = [w for w in group if isinstance(w.op, Weight) and w.op.role.group == EXPERTS]
        counts = apportioner.share_out(experts[0].shape[0]) if experts else ()
        # A small share can be less than one expert of a layer: then one device has them all, although several share.
        holders = [device for device, count in enumerate(counts) if count]
        for weight in group:
            if weight in experts:
                states[weight.name] = Split(0, Word.run(counts))
            elif len(holders) == 1:
                states[weight.name] = Split(0, Word.of(holders[0], weight.shape[0]))
    return states


def demands_of(
    graph: Graph,
    states: Mapping[str, State],
    apart: ExpertsApart | None,
    *,
    is_cut: bool,
    is_by_layers: bool = False,
) -> dict[Tensor, State]:
    """States of activations that inference, which looks at one node at a time, would choose otherwise.

    Several devices have a layer's experts: x is mirrored before the router. Otherwise, if attention is on one device
    alone, the router would run there, and three tensors would be sent: x, the ids and the weights. One device has
    the experts of `apart`, and several devices have the rest of each layer (`is_cut`): the result is an addend, reduced
    with the others' addends. Otherwise the residual would move to that device, and from there to the others.
    One device has the routed experts, and others have the shared expert, or a part of it (`is_cut`): x is mirrored, and
    both results are addends. Otherwise x, the shared expert's gate, one result and the sum would each be sent.
    Several devices have the experts of a layer that one device has otherwise (`is_by_layers`): the result is summed up
    on all of them, by rows. Otherwise that device would get the sum as a part without rows, of which native programs
    cannot compute fewer than they were made for.
    """
    demands: dict[Tensor, State] = {}
    shared = _owners_of_shared(graph, states)
    for node in graph.nodes:
        if isinstance(node.op, ExpertFfn):
            x, experts = node.inputs[0], node.inputs[3]
            state = states.get(experts.name)
            owner = None if state is None else sole_owner(state)
            if isinstance(state, Split) and owner is None:
                demands[x] = MIRRORED
                if is_by_layers:
                    demands[node] = MIRRORED
            elif is_cut and shared.get(_layer_of(experts), owner) != owner:
                demands |= {x: MIRRORED, node: PARTIAL}
            elif is_cut and is_apart(experts, apart):
                demands[node] = PARTIAL
    return demands


def _owners_of_shared(graph: Graph, states: Mapping[str, State]) -> dict[int | None, int | None]:
    """The device that has the shared expert, for each layer with one; None if it is cut."""
    return {
        _layer_of(weight): sole_owner(states.get(weight.name, MIRRORED))
        for weight in graph.weights
        if isinstance(weight.op, Weight) and weight.op.role.group == SHARED_FFN
    }


def _layer_of(weight: Tensor) -> int | None:
    assert isinstance(weight.op, Weight)
    return weight.op.role.layer
