"""Crews of crews: layers are shared out over groups of devices, and each group splits the tensors of its layers.

The graph is split twice. First by layers, where each group is one device: its first one. The result for that device is
a graph with messages to other groups, which is then split by tensors over the group. The first device sends and
receives for its group (see `localize`): one message from group to group, whatever the number of devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from motley.graph import Graph, Tensor
from motley.models import DecoderParams
from motley.ownership import State, sole_owner
from motley.split.apart import ExpertsApart
from motley.split.infer import infer
from motley.split.localize import localize
from motley.split.placement import LAYER, place

Groups = Sequence[tuple[int, ...]]


class LayersOfGroups:
    """Which group has which layers. Layers are shared out by the sums of each group's shares."""

    def __init__(self, params: DecoderParams, groups: Groups, shares: Sequence[Fraction]) -> None:
        self._params = params
        self._groups = groups
        self._shares = [Fraction(0)] * len(shares)  # as if each group were its first device
        for members in groups:
            self._shares[members[0]] = sum((shares[device] for device in members), Fraction(0))

    def own(self, weights: Sequence[Tensor], group: int) -> list[Tensor]:
        """The weights of a group's layers."""
        states, first = self._place(weights), self._groups[group][0]
        return [w for w in weights if w.name in states and sole_owner(states[w.name]) == first]

    def graph_of(self, whole: Graph, group: int) -> Graph:
        """The part of a graph that a group computes, with its messages to other groups."""
        split = infer(whole, len(self._shares), self._place(whole.weights))
        return localize(split, self._groups[group][0]).graph

    def _place(self, weights: Sequence[Tensor]) -> Mapping[str, State]:
        # Not by bytes: a graph with fewer layers (early exit) must have its output where it was loaded.
        return place(LAYER, weights, self._params, self._shares, keeps_output_last=True).states


def shares_of_group(shares: Sequence[Fraction], members: Sequence[int]) -> tuple[Fraction, ...]:
    """The shares within a group: those of its members, 0 of all other devices."""
    return tuple(share if device in members else Fraction(0) for device, share in enumerate(shares))


def apart_of_group(apart: ExpertsApart | None, members: Sequence[int]) -> ExpertsApart | None:
    """The experts apart within a group; None if no device of the group is for them: they stay with their layers."""
    if apart is None:
        return None
    shares = shares_of_group(apart.shares, members)
    return replace(apart, shares=shares) if any(shares) else None
