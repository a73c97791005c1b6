"""Rules broken on purpose, one at a time: the checks of the other files here must notice each of them."""

from __future__ import annotations

import random

import pytest
import torch
from mutations import MACHINERY, RULES, by_totals, forgets_earlier_ranges
from random_graphs import check_case, random_case
from rule_checks import check_rule
from rule_samples import sampled
from split_runner import check_split
from split_values import spell
from transition_checks import check_transitions

from motley.errors import MotleyError
from motley.graph import F32, Graph
from motley.graph.ops import Add, Input, LocalIds
from motley.ownership import Split

Patch = pytest.MonkeyPatch
CAUGHT = (AssertionError, MotleyError, RuntimeError, IndexError)

N_GRAPHS = 200


def check_rules(name: str) -> None:
    """What test_rules.py does for an op."""
    for seed in range(7):
        for sample in sampled(name, seed):
            check_rule(sample, n_devices=seed + 1, rng=random.Random(seed))


def check_graphs() -> None:
    """What test_random_graphs.py does."""
    for seed in range(N_GRAPHS):
        check_case(random_case(random.Random(seed)))


@pytest.mark.parametrize("mutation", RULES)
def test_a_broken_rule_is_caught_by_the_check_of_rules(mutation: str, monkeypatch: Patch) -> None:
    cls, breaks = RULES[mutation]
    breaks(monkeypatch, cls)
    with pytest.raises(CAUGHT):
        check_rules(cls.name)


# What the first few random graphs notice; the other mutations take more of them, or a way that is rarely the cheapest.
NOTICED_BY_GRAPHS = (
    "matmul: sums over parts of K claim to be whole",
    "matmul: rows of W in another order",
    "batch matmul: sums claim to be whole",
    "experts: sums claim to be whole",
    "experts: ids of the whole",
    "norm: rows are cut",
    "softmax: of addends",
    "mul: of addends",
    "attention: queries of another KV head",
    "cache: values of other heads",
    "reshape: word of another order",
    "concat: word of another order",
    "get rows: ids of the whole",
)


@pytest.mark.parametrize("mutation", NOTICED_BY_GRAPHS)
def test_a_broken_rule_is_caught_by_random_graphs(mutation: str, monkeypatch: Patch) -> None:
    cls, breaks = RULES[mutation]
    breaks(monkeypatch, cls)
    with pytest.raises(CAUGHT):
        check_graphs()


@pytest.mark.parametrize("mutation", MACHINERY)
def test_broken_machinery_is_caught_by_the_check_of_transitions(mutation: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(*MACHINERY[mutation])
    with pytest.raises(CAUGHT):
        check_transitions()


def test_ids_that_forget_earlier_ranges_are_caught(monkeypatch: Patch) -> None:
    monkeypatch.setattr(LocalIds, "reference", forgets_earlier_ranges)
    with pytest.raises(CAUGHT):
        check_rules("get_rows")


def test_states_compared_by_totals_are_caught(monkeypatch: Patch) -> None:
    x, y = (Input((4,), F32)(name=name) for name in "xy")
    graph, values = Graph.of(Add()(x, y)), {"x": torch.arange(4.0), "y": 10 * torch.arange(4.0)}
    placement = {"x": Split(0, spell([0, 0, 1, 1])), "y": Split(0, spell([0, 1, 0, 1]))}
    check_split(graph, values, 2, placement)
    monkeypatch.setattr(Split, "__hash__", lambda self: hash(self.axis))
    monkeypatch.setattr(Split, "__eq__", by_totals)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        check_split(graph, values, 2, placement)
