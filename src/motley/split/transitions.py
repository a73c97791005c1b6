"""From the state a tensor is in to the state that an op takes: which collective it needs, and what that moves."""

from __future__ import annotations

from dataclasses import dataclass

from motley.graph import CACHE, Tensor
from motley.graph.ops import Input, Weight
from motley.graph.ops.matmul import cuts_whole_blocks
from motley.ownership import MIRRORED, Mirrored, Partial, Split, State, sole_owner

ITEM_BYTES = 4  # activations are float32


@dataclass(frozen=True, order=True)
class Cost:
    """What a way costs: first collectives, then bytes that one device sends at most."""

    n_collectives: int = 0
    n_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.n_collectives + other.n_collectives, self.n_bytes + other.n_bytes)


FREE = Cost()


@dataclass(frozen=True)
class Transition:
    """A tensor is brought from one state to another because `user` needs it so."""

    tensor: Tensor
    source: State
    target: State
    user: Tensor | None  # None: the graph's result is wanted whole

    @property
    def kind(self) -> str:
        """The collective, or "" if no other device is needed."""
        return collective_between(self.source, self.target)

    @property
    def n_bytes(self) -> int:
        return payload(self.tensor, self.kind)


def collective_between(source: State, target: State) -> str:
    """The collective that takes a tensor from `source` to `target`; "" if each device can do it alone."""
    if source == target or isinstance(source, Mirrored):
        return ""
    owner = sole_owner(source)
    if owner is not None and owner == sole_owner(target):
        return ""
    match source, target:
        case Partial(), Mirrored():
            return "all_reduce"
        case Partial(), Split():
            return "reduce_scatter"
        case Split(), Partial():
            return ""
        case Split(), Mirrored():
            return "all_gather" if owner is None else "broadcast"
        case _:
            return "all_gather" if owner is None or sole_owner(target) is None else "send"


def payload(tensor: Tensor, kind: str) -> int:
    """Bytes of the tensor that a collective moves (an all-reduce moves them there and back)."""
    n_bytes = tensor.n_values * ITEM_BYTES
    return {"": 0, "all_reduce": 2 * n_bytes}.get(kind, n_bytes)


def is_fixed(tensor: Tensor) -> bool:
    """Weights and cache layers do not travel. What placement left mirrored may still be *laid out* split."""
    return isinstance(tensor.op, Weight) or tensor.dtype == CACHE


def can_lie(tensor: Tensor, state: State) -> bool:
    """Whether a weight or cache layer that placement left mirrored can be laid out like this instead."""
    if not isinstance(tensor.op, Weight | Input) or not isinstance(state, Split):
        return False
    if isinstance(tensor.op, Weight) and tensor.op.rows and state.axis > 0:
        return False  # what is made of chosen rows is cut between rows
    return state.axis < len(tensor.shape) - 1 or cuts_whole_blocks(state.word, tensor)


def transition_cost(tensor: Tensor, source: State, target: State) -> Cost | None:
    """What it costs to have `tensor` in `target` too; None if it cannot be."""
    if source == target:
        return FREE
    if is_fixed(tensor):
        owner = sole_owner(source)
        is_same = owner is not None and owner == sole_owner(target)
        return FREE if is_same or (source == MIRRORED and can_lie(tensor, target)) else None
    kind = collective_between(source, target)
    return Cost(int(bool(kind)), payload(tensor, kind))
