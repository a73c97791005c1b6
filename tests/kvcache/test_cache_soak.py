"""The cache's benchmarks, in short: no leak and no wrong token under a full pool; little waste; one prefix for all."""

from __future__ import annotations

import random
from collections import deque
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2])


def module(name: str) -> ModuleType:
    return import_module(f"benchmarks.{name}")


@pytest.mark.parametrize("seed", [1, 2])
def test_random_requests_forks_cancellations_and_failures_lose_nothing(seed: int) -> None:
    soak = module("soak").Soak(seed)
    for _ in range(400):
        soak.step()
    soak.finish()
    wanted = [
        "answers",
        "cancelled",
        "evictions",
        "failed alone",
        "failed steps",
        "forks",
        "further rounds of a call",
        "preempted",
        "retried",
        "steady steps",
    ]
    assert [what for what in (*wanted, "truncations") if soak.seen[what] == 0] == []
    ends = ("answers", "cancelled", "failed alone", "failed twice")
    assert sum(soak.seen[end] for end in ends) == soak.seen["requests"]
    assert soak.seen["failed twice"] * 4 < soak.seen["answers"]


def test_the_soak_notices_a_single_wrong_slot() -> None:
    soak_module = module("soak")
    soak = soak_module.Soak(seed=1, failure_odds=0)  # a failed run would write the right K/V again
    write, n_writes = soak.model.store, 0

    def store_with_a_mistake(blocks: list[list[int]], start: int, tokens: list[int]) -> None:
        nonlocal n_writes
        n_writes += 1
        write(blocks, start, tokens)
        if n_writes == 60:
            soak.model.arenas[0][soak_module.slot(blocks[0], start)] = b"mistake"

    soak.model.store = store_with_a_mistake
    with pytest.raises(AssertionError, match=r"wrong token|another's K/V"):
        deque((soak.step() for _ in range(400)), maxlen=0)


def test_a_real_model_s_streams_answer_as_alone(random_llama: Path) -> None:
    seen = module("soak").soak_model(str(random_llama), seed=3, n_answers=8)
    assert seen["answers"] == 8


def test_waste_stays_below_four_percent_and_a_prefix_is_stored_once() -> None:
    benchmark = module("kv_waste")
    rng = random.Random(5)
    for size in benchmark.BLOCK_SIZES:
        assert benchmark.measure_waste(size, 200, rng)["waste_percent"] < 4
        shared = benchmark.measure_sharing(size, 100, rng)
        assert shared["n_blocks"] == shared["n_blocks_of_one_prefix_and_tails"]
        assert shared["n_blocks"] < shared["n_blocks_without_sharing"] / 4
