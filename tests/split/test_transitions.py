"""Between any two states there is a transition; it moves what it says and computes what one device computes."""

from __future__ import annotations

import random

import pytest
from split_values import spell
from transition_checks import SHAPE, check_transition, check_transitions

from motley.graph import F32
from motley.graph.ops import Input
from motley.ownership import MIRRORED, PARTIAL, Split, State
from motley.split.transitions import Cost, Transition, transition_cost

ROWS, OTHER_ROWS = Split(0, spell([0, 1, 1, 2])), Split(0, spell([1, 0, 1, 2]))
ON_0, ON_1, ALL_ON_1 = Split(0, spell([0] * 4)), Split(0, spell([1] * 4)), Split(1, spell([1] * 6))


def test_every_state_can_become_every_other() -> None:
    check_transitions()


@pytest.mark.parametrize(
    ("source", "target", "collectives"),
    [
        (MIRRORED, ROWS, []),
        (MIRRORED, PARTIAL, []),
        (PARTIAL, MIRRORED, ["all_reduce"]),
        (PARTIAL, ROWS, ["reduce_scatter"]),
        (ROWS, MIRRORED, ["all_gather"]),
        (ROWS, PARTIAL, []),
        (ROWS, OTHER_ROWS, ["all_gather"]),
        (ROWS, ROWS, []),
        (ON_0, MIRRORED, ["broadcast"]),
        (ON_0, ON_1, ["send"]),
        (ON_1, ALL_ON_1, []),
        (ON_0, ROWS, ["all_gather"]),
        (ROWS, ON_0, ["all_gather"]),
    ],
)
def test_a_transition_takes_the_collective_that_it_needs(
    source: State, target: State, collectives: list[str]
) -> None:
    assert check_transition(source, target, 3, random.Random(0)) == collectives


def test_costs_count_collectives_before_bytes() -> None:
    x = Input(SHAPE, F32)(name="x")
    n_bytes = 4 * 6 * 4
    assert transition_cost(x, MIRRORED, ROWS) == Cost(0, 0)
    assert transition_cost(x, ROWS, MIRRORED) == Cost(1, n_bytes)
    assert transition_cost(x, PARTIAL, MIRRORED) == Cost(1, 2 * n_bytes)
    assert Cost(1, 10**9) < Cost(2, 0)
    assert Transition(x, PARTIAL, MIRRORED, None).n_bytes == 2 * n_bytes
