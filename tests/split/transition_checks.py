"""Graphs of one node that make a tensor go from one given state to another."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from rule_checks import words
from split_runner import check_split

from motley.formats import FORMATS, PackedTensor
from motley.graph import F32, Graph
from motley.graph.ops import Add, Input, Scale, Weight
from motley.graph.tensor import draw
from motley.ownership import MIRRORED, PARTIAL, Split, State

SHAPE = (4, 6)


def check_transition(source: State, target: State, n_devices: int, rng: random.Random) -> list[str]:
    """x lies as `source` and is needed as `target`. The collectives that this took on the way there."""
    x = Input(SHAPE, F32)(name="x")
    values: dict[str, Any] = {"x": draw(rng, *SHAPE)}
    if target == MIRRORED:
        node = Scale(2.0)(x)  # which leaves it as it is; the output is wanted whole
    elif target == PARTIAL:
        node = Add()(x, Input(SHAPE, F32)(name="y"))
        values["y"] = draw(rng, *SHAPE)
    else:
        node = Add()(x, Weight(SHAPE, "F32", "y")(name="y"))  # does not travel, so x must
        values["y"] = PackedTensor.pack(draw(rng, *SHAPE), FORMATS["F32"])
    placement = {"x": source, "y": target} if "y" in values else {"x": source}
    split = check_split(Graph.of(node), values, n_devices, placement)
    wanted = node if target == MIRRORED else x
    return [t.kind for t in split.collectives if t.tensor is wanted]


def states(n_devices: int, rng: random.Random) -> Iterator[State]:
    yield MIRRORED
    yield PARTIAL
    for axis, length in enumerate(SHAPE):
        yield from (Split(axis, word) for word in words(length, n_devices, rng))


def check_transitions() -> None:
    """From every kind of state to every kind of state."""
    for n_devices in (1, 2, 3, 7):
        rng = random.Random(n_devices)
        for source in states(n_devices, rng):
            for target in states(n_devices, rng):
                check_transition(source, target, n_devices, rng)
