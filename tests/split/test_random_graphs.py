"""Random graphs on random uneven crews: the values of one device, and the collectives that were announced."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from graph_steps import STEPS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_graphs import check_case, random_case
from split_runner import check_split, run_on_threads

from motley.graph.ops import OPS
from thorough import examples, first

RANDOM = st.randoms(use_true_random=False)  # shrinks, step by step
SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck))

RECURRENT_OPS = {"causal_conv", "delta_net"}  # tested by tests/backends/cpu/test_recurrent.py


@settings(SETTINGS, max_examples=examples(300))
@given(RANDOM)
def test_a_split_graph_computes_what_one_device_computes(rng: random.Random) -> None:
    check_case(random_case(rng))


@settings(SETTINGS, max_examples=40)
@given(RANDOM)
def test_threads_with_plans_and_arenas_compute_the_same(rng: random.Random) -> None:
    case = random_case(rng)
    check_split(case.graph, case.values, case.n_devices, case.allowed_placement, run_on_threads)


@pytest.mark.parametrize("block", first(1, range(4)))
def test_many_more_graphs(block: int) -> None:
    """Cheaper to draw than by Hypothesis, and larger. They meet every op, every collective and few refusals."""
    cases = [random_case(random.Random(seed), max_steps=14) for seed in range(350 * block, 350 * (block + 1))]
    splits = [check_case(case) for case in cases]
    ops = Counter(node.op.name for split in splits for node in split.graph.nodes)
    assert set(ops) == set(OPS) - RECURRENT_OPS
    assert min(ops.values()) > 10
    kinds = {transition.kind for split in splits for transition in split.transitions}
    assert kinds == {"", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"}
    n_refused = sum(case.allowed_placement != case.placement for case in cases)
    assert n_refused < 0.1 * len(cases)


def test_every_op_has_a_step() -> None:
    assert set(STEPS) == set(OPS) - RECURRENT_OPS - {"input", "weight"}
