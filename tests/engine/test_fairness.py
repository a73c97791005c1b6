"""A long prompt must not stop the others' tokens. A simulated clock counts the time; there is no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from test_scheduler import request

from motley.engine.pacing import Pace
from motley.engine.request import Request
from motley.engine.scheduler import Scheduler
from motley.kvcache.manager import CacheManager
from motley.kvcache.sequences import GroupSpec

STEP, TOKEN = 0.020, 0.004  # seconds: reading the weights, and each token of a step (250 tokens/s, a CPU)


@dataclass
class Simulation:
    """Steps of a scheduler on a clock that the steps move."""

    n_batch: int = 512
    n_parallel: int = 8
    stall_seconds: float = 0.25
    now: float = 0.0
    times: dict[Request, list[float]] = field(default_factory=dict)  # of each token

    def __post_init__(self) -> None:
        cache = CacheManager([GroupSpec("full", 4096)], 16)
        pace = Pace(self.stall_seconds)
        self.scheduler = Scheduler(cache, n_batch=self.n_batch, n_parallel=self.n_parallel, pace=pace)

    def add(self, n_prompt: int, first: int = 1, max_tokens: int = 1000) -> Request:
        made = request([first, *range(2, n_prompt + 1)], max_tokens=max_tokens)
        self.scheduler.add(made)
        self.times[made] = []
        return made

    def step(self) -> int:
        self.scheduler.begin()
        step = self.scheduler.schedule()
        seconds = STEP + TOKEN * step.n_tokens
        self.now += seconds
        self.scheduler.pace.note(step.n_tokens, seconds)
        self.scheduler.complete(step)
        for each, _ in step.work:
            if not each.n_pending:
                each.accept(5)
                self.times[each].append(self.now)
                if each.is_finished:
                    self.scheduler.remove(each)
        return step.n_tokens


def longest_gap(times: list[float]) -> float:
    return max(b - a for a, b in pairwise(times))


def test_a_long_prompt_delays_the_others_tokens_by_no_more_than_the_stall() -> None:
    simulation = Simulation()
    talker = simulation.add(8)
    simulation.step()
    long = simulation.add(8000, first=2)
    while not simulation.times[long]:
        simulation.step()
    assert longest_gap(simulation.times[talker]) <= 0.25 + STEP + 2 * TOKEN
    # It would be 2 s with whole batches of 512. The prompt itself loses less than a quarter for that.
    assert simulation.times[long][0] - simulation.times[talker][0] <= 1.25 * (
        8000 / 512 * STEP + 8000 * TOKEN
    )


def test_a_short_prompt_does_not_wait_for_a_long_one_before_it() -> None:
    simulation = Simulation()
    simulation.add(8000, max_tokens=5)
    simulation.step()
    begun = simulation.now
    short = simulation.add(20, first=2)
    while not simulation.times[short]:
        simulation.step()
    assert simulation.times[short][0] - begun <= STEP + 512 * TOKEN  # one step, not sixteen


def test_short_prompts_without_end_do_not_starve_a_long_one() -> None:
    simulation = Simulation(n_batch=64)
    long = simulation.add(2000, max_tokens=1)
    for number in range(100):
        simulation.add(40, first=number + 2, max_tokens=1)
        simulation.step()
    assert simulation.times[long]  # a part of each step is its own


def test_prompts_of_one_batch_are_served_in_their_order() -> None:
    simulation = Simulation()
    first, second = simulation.add(500), simulation.add(500, first=2)
    simulation.step()
    assert simulation.times[first]
    assert not simulation.times[second]


def test_alone_a_prompt_takes_whole_batches() -> None:
    simulation = Simulation()
    simulation.add(2000)
    assert [simulation.step() for _ in range(4)] == [512, 512, 512, 464]


@pytest.mark.parametrize("seconds_per_token", [1e-6, 1e-3, 0.1, 10.0])
def test_a_chunk_is_never_empty_and_fits_the_stall_where_it_can(seconds_per_token: float) -> None:
    pace = Pace(0.25)
    assert pace.max_prompt_tokens() >= 16
    pace.note(100, 100 * seconds_per_token)
    pace.note(100, 1000 * seconds_per_token)  # slow for another reason
    n_tokens = pace.max_prompt_tokens()
    assert n_tokens % 16 == 0
    assert n_tokens == 16 or n_tokens * seconds_per_token <= 0.25
    pace.note(1, 50.0)  # too small to tell
    assert pace.max_prompt_tokens() == n_tokens
