"""Drafts beside everything else that happens to requests: failures, cancellation, chained steps, other requests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import stepped_by_hand
from drafters import Guess, give, half, now_and_then, right, scattered, serve, wrong
from faults import Faults

from motley import LLM
from motley.bundled import bundled_draft_path
from motley.engine import SamplingParams
from motley.engine.choosing import ChoiceRow, HostChooser, Pending
from motley.engine.drafting import Draft, Lookahead, Lookup
from motley.engine.drafting.control import FixedControl
from motley.engine.drafting.draft import DraftRequest
from motley.runtime import Runner

PROMPTS = [list(range(3, 30)), [5, 9, 9, 7], list(range(60, 30, -2))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=20, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=20, repeat_penalty=1.2, ignore_eos=True),
]


@pytest.fixture(scope="module")
def path() -> Path:
    return bundled_draft_path()


@contextmanager
def load(path: Path, **options: Any) -> Iterator[LLM]:
    """The model with an engine that takes its steps only when the test calls `step`."""
    with (
        LLM(
            path,
            **(
                {"n_ctx": 128, "n_batch": 64, "n_parallel": 4, "kv_block_size": 8, "devices": "cpu"} | options
            ),
        ) as llm,
        stepped_by_hand(llm),
    ):
        yield llm


def known_answers(llm: LLM) -> list[tuple[int, ...]]:
    give(llm, right)
    return [tuple(r.generated) for r in serve(llm._loaded.engine, PROMPTS, PARAMS)]


def teach(llm: LLM, guess: Any, known: Sequence[tuple[int, ...]], *, draft_max: int = 7) -> Any:
    drafter = give(llm, guess, draft_max=draft_max)
    drafter.answers |= dict(zip(map(tuple, PROMPTS), known, strict=True))
    return drafter


@pytest.mark.parametrize("guess", [half, now_and_then], ids=lambda guess: guess.__name__)
@pytest.mark.parametrize("where", ["run", "choose", "commit", "reserve"])
def test_every_failure_of_a_step_with_drafts_leaves_the_texts_as_they_are(
    path: Path, where: str, guess: Guess
) -> None:
    """Also of requests that have no draft in the next step, beside others that have one."""
    with load(path) as llm:
        engine = llm._loaded.engine
        known = known_answers(llm)
        assert engine._chooser is not None
        places = {
            "run": (engine.runner, "run"),
            "choose": (engine._chooser, "choose"),
            "commit": (engine.cache, "commit"),
            "reserve": (engine.cache, "reserve"),
        }
        faults = Faults(where, [places[where]])
        n = 0
        while True:
            n += 1
            teach(llm, guess, known)
            with faults.armed(n, MemoryError):
                requests = [engine.add(prompt, each) for prompt, each in zip(PROMPTS, PARAMS, strict=True)]
                while engine.has_work:
                    engine.step()
                    engine.cache.check_integrity()
            assert [tuple(request.generated) for request in requests] == known
            assert all(request.finish_reason == "length" for request in requests)
            if n > faults.n_calls:
                break
            # A request that has just ended needs no other try: its last tokens are committed after it.
            assert any(request.n_retries for request in requests) or where == "commit"
        assert n > 5


def test_a_drafter_that_fails_is_not_asked_again(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with load(path) as llm:
        known = known_answers(llm)
        drafter = teach(llm, right, known)
        calls = []

        def failing(asks: Sequence[DraftRequest]) -> list[Draft]:
            calls.append(len(asks))
            raise RuntimeError("no ideas")

        drafter.draft = failing
        requests = serve(llm._loaded.engine, PROMPTS, PARAMS)
        assert [tuple(r.generated) for r in requests] == known
        assert len(calls) == 1
        assert "drafter lookup failed" in caplog.text


@pytest.mark.parametrize(
    ("drafter", "spec", "name", "n"),
    [
        (Lookup, "lookup", "find", 3),
        (Lookup, "lookup,lookahead", "draft", 1),
        (Lookahead, "lookahead", "learn", 3),
    ],
)
def test_a_drafter_of_the_engine_that_fails_is_left_out(
    path: Path, drafter: Any, spec: str, name: str, n: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In its n-th call. No request is computed again, and it is not asked again."""
    with load(path) as llm:
        engine = llm._loaded.engine
        engine.speculator._control = FixedControl()
        params = [replace(each, speculative="off") for each in PARAMS]
        known = [r.generated for r in serve(engine, PROMPTS, params)]
        faults = Faults(name, [(drafter, name)])
        params = [replace(each, speculative=spec) for each in PARAMS]
        with faults.armed(n, MemoryError):
            assert [r.generated for r in serve(engine, PROMPTS, params)] == known
        assert n <= faults.n_calls <= n + len(PROMPTS)  # at most, for the other requests of the same step
        assert f"drafter {drafter.name} failed" in caplog.text


def test_a_prompt_that_cannot_be_indexed_in_advance_is_indexed_in_steps(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with load(path) as llm:
        engine = llm._loaded.engine
        with Faults("prepare", [(Lookup, "prepare")]).armed(1, MemoryError):
            request = engine.new_request([5, 6, 7, 8] * 4, replace(PARAMS[0], speculative="lookup"))
        assert "was not indexed" in caplog.text
        engine.queue(request)
        while engine.has_work:
            engine.step()
        assert request.memory[Lookup.name].n_left == 0
        assert Lookup.name in [each.name for each in engine.speculator._drafters]


@pytest.mark.parametrize("guess", [right, half, wrong, scattered], ids=lambda guess: guess.__name__)
def test_requests_come_and_go_while_others_have_drafts(path: Path, guess: Any) -> None:
    """Cancelled and preempted at random; the answers that are not cancelled are the same."""
    with load(path, kv_cache_tokens=128) as llm:
        engine = llm._loaded.engine
        known = known_answers(llm)
        teach(llm, guess, known)
        rng = random.Random(5)
        requests, cancelled = [], set()
        for _ in range(60):
            which = rng.randrange(3)
            if rng.random() < 0.4:
                requests.append((which, engine.add(PROMPTS[which], PARAMS[which])))
            if requests and rng.random() < 0.15:
                _, victim = rng.choice(requests)
                if not victim.is_finished:
                    cancelled.add(victim)
                engine.cancel(victim)
            if rng.random() < 0.1:
                engine.preempt()
            if engine.has_work:
                engine.step()
            engine.cache.check_integrity()
        while engine.has_work:
            engine.step()
            engine.cache.check_integrity()
        assert cancelled
        assert len(requests) > len(cancelled) + 5
        for which, request in requests:
            tokens = tuple(request.generated)
            assert tokens == (known[which][: len(tokens)] if request in cancelled else known[which])
            assert not request.n_retries


def test_drafts_leave_room_for_prompts(path: Path) -> None:
    """A batch full of drafted tokens would keep a prompt waiting for ever."""
    with load(path, n_batch=8) as llm:
        engine = llm._loaded.engine
        known = known_answers(llm)
        teach(llm, wrong, known)
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        first = engine.add(PROMPTS[1], params)
        for _ in range(3):
            engine.step()
        late = engine.add(PROMPTS[0], PARAMS[0])
        while not late.is_finished:
            engine.step()
        assert not first.is_finished
        assert tuple(late.generated) == known[0]


class ChainingChooser(HostChooser):
    """Gives the tokens as a tensor, too, as a GPU does."""

    def choose(self, logits: torch.Tensor, rows: Sequence[ChoiceRow]) -> Pending:
        found = super().choose(logits, rows).tokens()
        ids = [token if isinstance(token, int) else 0 for token in found]
        return Pending(lambda: found, torch.tensor(ids, dtype=torch.int32))


@pytest.mark.parametrize("guess", [right, half, wrong, scattered], ids=lambda guess: guess.__name__)
def test_texts_are_the_same_where_steps_are_chained(
    path: Path, guess: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps without drafts are chained, and steps with drafts come in between."""
    with load(path) as llm:
        known = known_answers(llm)
        monkeypatch.setattr(Runner, "can_chain", True)
        llm._loaded.engine._chooser = ChainingChooser()
        drafter = teach(llm, guess, known, draft_max=2)
        rng = random.Random(1)
        monkeypatch.setattr(drafter, "may_draft", lambda _request: rng.random() < 0.15)
        n_chained = []
        run = Runner.run

        def watched(self: Runner, batch: Any, tokens: Any, copies: Any) -> torch.Tensor:
            n_chained.append(isinstance(tokens, torch.Tensor))
            return run(self, batch, tokens, copies)

        monkeypatch.setattr(Runner, "run", watched)
        draft = drafter.draft

        def sometimes(asks: Sequence[DraftRequest]) -> list[Draft]:
            return [each if rng.random() < 0.2 else Draft((), "lookup") for each in draft(asks)]

        monkeypatch.setattr(drafter, "draft", sometimes)
        requests = serve(llm._loaded.engine, PROMPTS, PARAMS)
        assert [tuple(r.generated) for r in requests] == known
        assert any(n_chained)
        assert drafter.n_accepted
