"""Transitions of a tensor between states: the collective that each needs, and the bytes that it moves."""

from __future__ import annotations

from dataclasses import dataclass

from motley.graph import HANDLES, Tensor
from motley.graph.ops import Input, Weight
from motley.graph.ops.matmul import cuts_whole_blocks
from motley.ownership import MIRRORED, Mirrored, Partial, Split, State, sole_owner

ITEM_BYTES = 4  # activations are float32


@dataclass(frozen=True, order=True)
class Cost:
    """The cost of a way: compared first by collectives, then by the largest number of bytes that one device sends."""

    n_collectives: int = 0
    n_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.n_collectives + other.n_collectives, self.n_bytes + other.n_bytes)


FREE = Cost()


@dataclass(frozen=True)
class Transition:
    """A change of a tensor's state, required by `user`."""

    tensor: Tensor
    source: State
    target: State
    user: Tensor | None  # None: required by the graph's output, which must be whole

    @property
    def kind(self) -> str:
        """The collective's name; "" if no communication is needed."""
        return collective_between(self.source, self.target)

    @property
    def n_bytes(self) -> int:
        return payload(self.tensor, self.kind)


def collective_between(source: State, target: State) -> str:
    """The collective that takes a tensor from `source` to `target`; "" if no communication is needed."""
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
    """Bytes of the tensor that a collective moves (an all-reduce moves them twice)."""
    n_bytes = tensor.n_values * ITEM_BYTES
    return {"": 0, "all_reduce": 2 * n_bytes}.get(kind, n_bytes)


def is_fixed(tensor: Tensor) -> bool:
    """Whether the tensor is a weight or cache layer, which is never sent. A mirrored one may be loaded as a split."""
    return isinstance(tensor.op, Weight) or tensor.dtype in HANDLES


def can_lie(tensor: Tensor, state: State) -> bool:
    """Whether a weight or cache layer with a mirrored placement can be loaded in `state` instead."""
    if not isinstance(tensor.op, Weight | Input) or not isinstance(state, Split):
        return False
    if isinstance(tensor.op, Weight) and tensor.op.rows and state.axis > 0:
        return False  # a weight with `rows` can only be split between rows
    return state.axis < len(tensor.shape) - 1 or cuts_whole_blocks(state.word, tensor)


def transition_cost(tensor: Tensor, source: State, target: State) -> Cost | None:
    """The cost of making `tensor` available in `target`; None if that is impossible."""
    if source == target:
        return FREE
    if is_fixed(tensor):
        owner = sole_owner(source)
        is_same = owner is not None and owner == sole_owner(target)
        return FREE if is_same or (source == MIRRORED and can_lie(tensor, target)) else None
    kind = collective_between(source, target)
    return Cost(int(bool(kind)), payload(tensor, kind))
