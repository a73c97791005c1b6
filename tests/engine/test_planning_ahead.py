"""The next step is planned while a GPU computes the present one. No answer may depend on it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from motley import LLM
from motley.engine import Engine, Request, SamplingParams
from thorough import first


@pytest.fixture(scope="module")
def path(bundled: Path) -> Path:
    return bundled


def load(path: Path, **options: Any) -> LLM:
    return LLM(path, n_ctx=256, n_parallel=4, n_batch=64, **options)


def test_decoding_is_scheduled_once_and_planned_ahead_from_then_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load(path)
    own = llm._loaded.engine
    schedule, calls = own.scheduler.schedule, []
    monkeypatch.setattr(own.scheduler, "schedule", lambda *drafts: calls.append(1) or schedule(*drafts))
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    requests = [own.add([1, 50 + i, 60], params) for i in range(3)]
    while not all(request.is_finished for request in requests):
        own.step()
    assert len(calls) == 1


@pytest.mark.parametrize("paging", [False, True], ids=["fixed", "demand paged"])
@pytest.mark.parametrize("seed", first(1, range(3)))
def test_answers_are_those_of_an_engine_that_plans_nothing_ahead(
    path: Path, seed: int, paging: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come, stop early, are cancelled and preempted at random, with and without planning ahead."""
    options = {"kv_cache_tokens": 256, "kv_block_size": 16, "kv_cache_demand_paged": paging}
    seeing, blind = load(path, **options), load(path, **options)
    monkeypatch.setattr(blind._loaded.engine.scheduler, "plan_ahead", lambda **_: None)
    answers = [serve(llm._loaded.engine, random.Random(seed)) for llm in (seeing, blind)]
    assert answers[0] == answers[1]
    seeing._loaded.cache.check_integrity()


def serve(own: Engine, rng: random.Random) -> list[tuple[int, ...]]:
    """The answers to all requests that were not cancelled."""
    requests: list[Request] = []
    cancelled: set[int] = set()
    for step in range(120):
        if step < 80 and rng.random() < 0.3:
            prompt = [1, *(rng.randrange(3, 500) for _ in range(rng.randint(1, 90)))]
            stops = frozenset(range(3, 60)) if rng.random() < 0.5 else frozenset()
            params = SamplingParams(max_tokens=rng.randint(1, 60), temperature=0, stop_token_ids=stops)
            requests.append(own.add(prompt, params))
        if requests and rng.random() < 0.05:
            number = rng.randrange(len(requests))
            cancelled.add(number)
            own.cancel(requests[number])
        if own.scheduler.has_work:
            own.step()
    while own.scheduler.has_work:
        own.step()
    return [tuple(r.generated) for number, r in enumerate(requests) if number not in cancelled]
