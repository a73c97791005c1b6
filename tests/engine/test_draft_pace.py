"""Drafters that take time are asked less often while their drafts do not pay: with a simulated clock."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from by_hand import stepped_by_hand
from drafters import Knowing, right

from motley import LLM
from motley.bundled import bundled_draft_path
from motley.engine import SamplingParams
from motley.engine.drafting import Lookup, Speculator
from motley.engine.drafting.control import AdaptiveControl, FixedControl
from motley.engine.drafting.draft import Draft, DraftRequest
from motley.engine.drafting.pace import Pace
from motley.engine.request import Request
from motley.engine.steady import Steady

MAX_ROUNDS = 8
PORTION = 512  # tokens that are indexed in a step


class Costly(Knowing):
    """A drafter that takes time."""

    name = "draft"
    is_free = False

    def draft(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft((1, 2, 3)[: ask.n_max], self.name) for ask in asks]


class Switched(FixedControl):
    """Drafts that take time pay while `pays`."""

    def __init__(self) -> None:
        self.pays = False
        self.n_steps: list[int] = []  # of each question

    def length(
        self, drafter: str, requests: Sequence[Request], n_rows: int, n_max: int, n_steps: int = 1
    ) -> int:
        self.n_steps.append(n_steps)
        return n_max if self.pays else 0


class Simulated:
    """An engine whose native call has as many rounds as need no drafts."""

    def __init__(self, *drafters: Any, draft_min: int = 0) -> None:
        self.control = Switched()
        self.speculator = Speculator(
            drafters, spec="off", n_vocab=10**6, draft_min=draft_min, control=self.control
        )
        self.requests: list[Request] = []
        self.n_steps = 0

    def add(self, spec: str, prompt: Sequence[int] = (1, 2, 3)) -> Request:
        request = Request(
            prompt=tuple(prompt),
            sampler=None,
            text=None,  # type: ignore[arg-type]
            stop_ids=frozenset(),
            max_tokens=None,
            speculation=self.speculator.choose(spec),
        )
        self.speculator.prepare(request)
        request.n_computed = len(prompt) - 1
        self.requests.append(request)
        return request

    def call(self, token: int = 0) -> tuple[int, set[str]]:
        """The rounds of a call, and the drafters that had a draft for its first step."""
        scheduler: Any = SimpleNamespace(
            running=self.requests, waiting=[], max_running=8, room_for_drafts=lambda: 60
        )
        drafts = self.speculator.propose(scheduler)
        n_rounds = 1 if drafts else min(MAX_ROUNDS, 1 + self.speculator.n_quiet)
        self.speculator.pass_over(n_rounds - 1)
        for request in self.requests:
            request.tokens += range(token, token + n_rounds)
            request.generated += range(token, token + n_rounds)
            request.n_computed += n_rounds
        self.n_steps += n_rounds
        return n_rounds, {draft.drafter for draft in drafts.values()}


def test_a_drafter_whose_drafts_do_not_pay_is_asked_less_and_less_often() -> None:
    engine = Simulated(Costly(right, 10))
    engine.add("draft")
    rounds = [engine.call()[0] for _ in range(40)]
    assert rounds[:3] == [1, 1, 1]
    assert rounds == sorted(rounds)
    assert set(rounds) == {1, 2, 4, 8}
    assert len(engine.control.n_steps) == len(rounds)  # once in each call
    assert (
        sum(engine.control.n_steps) == engine.n_steps - 7
    )  # each answer counts for the steps since the one before


@pytest.mark.parametrize("is_usual", [True, False])
def test_a_drafter_without_drafts_is_asked_less_often_unless_it_prepares_them(is_usual: bool) -> None:
    class Empty(Costly):
        def draft(self, asks: Sequence[DraftRequest]) -> list[Draft]:
            self.is_usual = is_usual
            return [Draft((), self.name)] * len(asks)

    engine = Simulated(Empty(right, 10))
    engine.control.pays = True
    engine.add("draft")
    assert max(engine.call()[0] for _ in range(40)) == (MAX_ROUNDS if is_usual else 1)


def test_it_is_asked_in_each_step_again_once_its_drafts_pay() -> None:
    engine = Simulated(Costly(right, 10))
    engine.add("draft")
    for _ in range(20):
        engine.call()
    engine.control.pays = True
    n_before = engine.n_steps
    while "draft" not in engine.call()[1]:
        pass
    assert engine.n_steps - n_before <= 1 + MAX_ROUNDS
    for _ in range(50):
        assert engine.call() == (1, {"draft"})
    engine.control.pays = False
    assert [engine.call()[0] for _ in range(3)] == [1, 1, 1]
    assert max(engine.call()[0] for _ in range(20)) == MAX_ROUNDS


def test_it_is_asked_in_each_step_again_when_a_request_comes() -> None:
    engine = Simulated(Costly(right, 10))
    engine.add("draft")
    while engine.call()[0] < MAX_ROUNDS:
        pass
    engine.add("draft")
    assert [engine.call()[0] for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("spec", ["lookup,draft", "draft"])
@pytest.mark.parametrize("other", ["lookup", "lookup,draft", "off"])
def test_texts_are_looked_up_at_their_own_pace(spec: str, other: str) -> None:
    """In each step after a draft that was of use, as if there were no other drafter."""
    engine = Simulated(Costly(right, 10), Lookup())
    first = engine.add(spec, [1, 2, 3, 4, 0, 0, 0, 0, 1, 2])
    engine.add(other)
    is_looked_up = "lookup" in (*first.speculation.drafters, *engine.requests[1].speculation.drafters)
    while engine.call(token=len(first.tokens) + 100)[0] < MAX_ROUNDS:
        pass
    assert engine.speculator._lookup is not None
    engine.speculator._lookup.note_use()
    rounds = [engine.call(token=len(first.tokens) + 100)[0] for _ in range(3)]
    assert rounds[1:] == ([1, 1] if is_looked_up else [8, 8])
    if "lookup" in first.speculation.drafters:
        for token in (1, 2, 3):
            engine.speculator._lookup.note_use()
            engine.call(token)
        assert engine.call(4)[1] == {"lookup"}
        assert not engine.control.pays


def test_a_text_is_looked_up_in_each_step_in_which_another_drafter_is_asked() -> None:
    engine = Simulated(Costly(right, 10), Lookup())
    engine.add("lookup,draft", [1, 2, 3, 4, 0, 0, 0, 0, 1, 2])
    engine.control.pays = True
    for number in range(60):
        assert engine.call(token=number + 100) == (1, {"draft"})
    for token in (1, 2, 3):
        engine.call(token)
    assert engine.call(4)[1] == {"lookup"}


def test_a_text_that_is_not_indexed_yet_is_indexed_in_each_step() -> None:
    lookup = Lookup(n_remembered=1)  # so nothing is indexed in advance
    engine = Simulated(lookup, Costly(right, 10))
    request = engine.add("lookup,draft", range(19 * PORTION))
    rounds = [engine.call(10**5 + i)[0] for i in range(20)]
    assert rounds[:19] == [1] * 19
    assert rounds[19] > 1
    assert not request.memory[Lookup.name].n_left


def test_where_a_draft_has_too_few_tokens_another_drafter_is_asked() -> None:
    class Short(Knowing):
        def draft(self, asks: Sequence[DraftRequest]) -> list[Draft]:
            return [Draft((1,), self.name)] * len(asks)

    engine = Simulated(Short(right, 10), Costly(right, 10), draft_min=2)
    engine.control.pays = True
    engine.add("lookup,draft")
    assert engine.call() == (1, {"draft"})


def test_beside_a_grammar_each_step_is_looked_at() -> None:
    """What it forces is known one step before."""

    class Grammar(Knowing):
        name = "grammar"

        def draft(self, asks: Sequence[DraftRequest]) -> list[Draft]:
            return [Draft((), self.name) for _ in asks]

    engine = Simulated(Costly(right, 10), Grammar(right, 10))
    engine.add("grammar,draft")
    assert {engine.call()[0] for _ in range(60)} == {1}


def test_a_pace_counts_steps_that_pass_without_a_question() -> None:
    pace = Pace()
    found = []
    for _ in range(30):
        assert pace.is_due()
        found.append(pace.n_covered)
        pace.pass_over(pace.n_pause)
    assert found[:6] == [1, 1, 1, 1, 2, 2]
    assert found[-1] == 8
    pace.note_use()
    assert pace.n_pause == 0
    assert pace.is_due()


def test_the_native_call_of_several_steps_stays_where_drafts_do_not_pay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A drafter that takes five steps for each token of a draft, although all its tokens are right."""
    now, rounds, n_drafted = 0.0, list[int](), 0
    run_steady = Steady.run

    def timed_steady(steady: Steady, n_rounds: int = 1) -> Any:
        nonlocal now
        now += n_rounds
        rounds.append(n_rounds)
        return run_steady(steady, n_rounds)

    class Slow(Knowing):
        name = "draft"
        is_free = False

        def draft(self, asks: Sequence[DraftRequest]) -> list[Draft]:
            nonlocal now, n_drafted
            found = super().draft(asks)
            n_drafted += len(found)
            now += 5 * max(len(draft.tokens) for draft in found)
            return found

    with LLM(bundled_draft_path(), n_ctx=256, devices="cpu") as llm, stepped_by_hand(llm):
        engine, prompt = llm._loaded.engine, (5, 9, 9, 7)
        run = engine.runner.run

        def timed(*given: Any) -> Any:
            nonlocal now
            now += 1
            return run(*given)

        monkeypatch.setattr(engine.runner, "run", timed)
        monkeypatch.setattr(Steady, "run", timed_steady)
        engine._clock = lambda: now

        def answer(spec: str) -> tuple[int, ...]:
            rounds.clear()
            params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, speculative=spec)
            request = engine.add(prompt, params)
            while engine.has_work:
                engine.step(100.0)
                engine.cache.check_integrity()
            return tuple(request.generated)

        without = answer("off")
        n_calls = len(rounds)
        drafter = Slow(right, engine.n_vocab)
        drafter.answers[prompt] = without
        engine.speculator = Speculator(
            [drafter],
            spec="off",
            n_vocab=engine.n_vocab,
            control=AdaptiveControl({"draft": (0.85,)}),
            clock=lambda: now,
        )
        assert answer("draft") == without
        assert n_drafted > 0  # it was tried
        assert max(rounds) == MAX_ROUNDS
        assert len(rounds) < n_calls + 30
