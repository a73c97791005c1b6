"""How long drafts are: simulated machines and drafters, with a simulated clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from by_hand import stepped_by_hand
from drafters import Knowing, right, serve

from motley import LLM
from motley.bundled import bundled_draft_path
from motley.engine import SamplingParams
from motley.engine.drafting import Speculator
from motley.engine.drafting.control import AdaptiveControl, FixedControl
from motley.engine.drafting.costs import PlanAccount, StepCosts
from motley.engine.drafting.draft import Draft, DraftRequest
from motley.engine.request import Request, Speculation
from motley.runtime import Runner, SteadyRun

DRAFT_MAX = 15
Cost = Callable[[int], float]


def flat(n_rows: int) -> float:
    """A machine that waits for memory: rows cost little."""
    return 1 + 0.02 * (n_rows - 1)


def small_cpu(n_rows: int) -> float:
    """The bundled model on two cores: the second row costs most."""
    return 1.0 if n_rows == 1 else 1.55 + 0.1 * n_rows


def linear(n_rows: int) -> float:
    """A machine that is busy: each row costs as much as the first."""
    return float(n_rows)


def request(draft_min: int = 0) -> Request:
    return Request(
        prompt=(1, 2, 3),
        sampler=None,
        text=None,  # type: ignore[arg-type]
        stop_ids=frozenset(),
        max_tokens=10**6,
        speculation=Speculation(("lookup",), DRAFT_MAX, draft_min),
    )


def speed_up(
    p_right: float,
    cost: Cost,
    *,
    n_requests: int = 1,
    per_round: float = 0.0,
    noise: float = 0.0,
    n_steps: int = 1200,
    p_draft: float = 1.0,
    plan: float = 0.0,
    computed: Callable[[int], int] = lambda n_rows: n_rows,
    draft_min: int = 0,
    seed: int = 1,
) -> float:
    """Tokens per simulated second with drafts : without.

    `per_round`: what a drafter takes for each token. `plan`: what the first step of a number of rows takes longer.
    """
    rng = random.Random(seed)
    control = AdaptiveControl({"lookup": (0.85 if per_round else 0.6,)}, computed=computed)
    requests = [request(draft_min) for _ in range(n_requests)]
    seconds, n_tokens = 0.0, 0
    planned = {n_requests}
    control.note_plan(n_requests, plan + cost(n_requests), n_requests=n_requests)
    for _ in range(n_steps):
        n_max = DRAFT_MAX
        if per_round:
            n_max = control.length("lookup", requests, n_requests, DRAFT_MAX)
            if n_max:
                control.note_drafting("lookup", n_max, n_max * per_round)
                seconds += n_max * per_round
        found = {
            r: Draft(tuple(0 if rng.random() < p_right else 1 for _ in range(n_max)), "lookup")
            for r in requests
            if n_max and rng.random() < p_draft
        }
        drafts = control.allot(found, n_requests, 64 - n_requests) if found else {}
        n_drafted = [len(draft.tokens) for draft in drafts.values()]
        n_rows, most_rows = n_requests + sum(n_drafted), 1 + max(n_drafted, default=0)
        took = cost(n_rows) * (1 + noise * rng.expovariate(1))
        seconds += took
        if n_rows in planned:
            control.note_step(n_rows, took, n_requests=n_requests, most_rows=most_rows)
        else:
            planned.add(n_rows)
            seconds += plan
            control.note_plan(n_rows, took + plan, n_requests=n_requests, most_rows=most_rows)
        for each in requests:  # the text: zeros
            tokens = drafts[each].tokens if each in drafts else ()
            n_right = next((i for i, token in enumerate(tokens) if token), len(tokens))
            if each in drafts:
                control.note_draft(each, drafts[each], n_right, n_right < len(tokens))
            each.generated += [0] * (1 + n_right)
            n_tokens += 1 + n_right
    mean_noise = 1 + noise
    return n_tokens / seconds * cost(n_requests) * mean_noise / n_requests


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("cost", [flat, small_cpu, linear], ids=lambda cost: cost.__name__)
@pytest.mark.parametrize("p_right", [0.0, 0.4])
@pytest.mark.parametrize("n_requests", [1, 8])
def test_drafts_that_are_wrong_cost_little(p_right: float, cost: Cost, noise: float, n_requests: int) -> None:
    assert speed_up(p_right, cost, noise=noise, n_requests=n_requests) > 0.96


@pytest.mark.parametrize("p_right", [0.0, 0.3, 0.5])
def test_a_short_answer_does_not_wait_for_plans_that_it_hardly_uses(p_right: float) -> None:
    assert speed_up(p_right, small_cpu, p_draft=0.2, n_steps=300, plan=25.0) > 0.95


@pytest.mark.parametrize("is_given", [False, True])
def test_a_plan_is_made_once_it_would_have_saved_its_price(is_given: bool) -> None:
    """Half of it, or where plans are also made while the engine is idle, four times as much."""
    price = 0.25 if is_given else 2.0
    account = PlanAccount(price=price if is_given else 0.0)
    assert account.is_enough is not is_given  # the first one is made to find out
    account.note(2, 2.0)
    found = []
    for saved in (0.0, 0.9, -0.2, 0.2, 0.2):
        account.credit(saved)
        found.append(account.is_enough)
    assert found == [False, False, False, False, True]
    account.note(3, 2.5, n_requests=3)
    assert account.is_enough  # of a step without drafts: the evidence stays
    account.note(4, 2.5, n_requests=1, most_rows=4)
    assert not account.is_enough
    assert account.has(4)


@pytest.mark.parametrize("p_right", [0.3, 0.8, 0.95])
def test_drafts_fill_the_rows_that_are_computed(p_right: float) -> None:
    """A device that computes padding: eight rows cost as much as five. The best length is found."""

    def computed(n_rows: int) -> int:
        return 1 << (n_rows - 1).bit_length()

    def cost(n_rows: int) -> float:
        return {1: 1.0, 2: 1.5, 4: 1.55, 8: 1.67, 16: 2.05}.get(computed(n_rows), 4.0)

    def expected(n_drafted: int) -> float:
        return sum(p_right**i for i in range(n_drafted + 1)) / cost(1 + n_drafted)

    best = max(expected(n) for n in range(DRAFT_MAX + 1))
    found = [speed_up(p_right, cost, computed=computed, seed=seed, n_steps=2000) for seed in range(3)]
    assert sum(found) / len(found) > 0.95 * best


def test_plans_are_made_once_they_pay() -> None:
    assert speed_up(0.97, small_cpu, n_steps=1000, plan=25.0) > 2.0


def test_unused_drafts_tell_whether_they_were_right() -> None:
    control = AdaptiveControl({"lookup": (0.1,)})  # nothing is expected of its drafts
    each = request()
    for _ in range(4):
        control.note_step(1, 1.0)
    used = 0
    for _ in range(60):
        drafts = control.allot({each: Draft((0,) * 4, "lookup")}, 1, 63)
        used += bool(drafts)
        each.generated.append(0)
        control.note_step(1, 1.0)
    assert used > 20


@pytest.mark.parametrize(
    ("p_right", "cost", "least"),
    [(0.8, flat, 3.5), (0.95, flat, 7.0), (0.5, flat, 1.7), (0.9, small_cpu, 2.1), (0.97, small_cpu, 3.0)],
)
def test_drafts_that_are_right_pay(p_right: float, cost: Cost, least: float) -> None:
    assert speed_up(p_right, cost) >= least
    assert speed_up(p_right, cost, noise=0.5) >= 0.9 * least


def test_on_a_machine_that_is_busy_nothing_is_drafted() -> None:
    assert 0.97 <= speed_up(0.8, linear, n_requests=8) <= 1.01


@pytest.mark.parametrize(("p_right", "least"), [(0.0, 0.94), (0.5, 0.94), (0.9, 1.35)])
def test_a_drafter_that_takes_time_is_asked_as_long_as_it_pays(p_right: float, least: float) -> None:
    assert speed_up(p_right, small_cpu, per_round=0.15) >= least


@pytest.mark.parametrize("draft_min", [2, 4, 8, 12])
@pytest.mark.parametrize("p_right", [0.5, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("n_requests", [1, 4])
def test_no_time_is_lost_for_drafts_that_have_too_few_tokens_to_be_used(
    n_requests: int, p_right: float, draft_min: int
) -> None:
    for cost in (flat, small_cpu):
        assert speed_up(p_right, cost, n_requests=n_requests, per_round=0.1, draft_min=draft_min) > 0.96


@pytest.mark.parametrize(("p_right", "draft_min", "least"), [(0.8, 8, 3.4), (0.8, 12, 3.4), (0.5, 4, 1.5)])
def test_drafts_of_at_least_so_many_tokens_are_used_where_they_pay(
    p_right: float, draft_min: int, least: float
) -> None:
    """Also where fewer tokens would pay better."""
    assert speed_up(p_right, flat, draft_min=draft_min) > least


def test_a_drafter_as_slow_as_the_model_is_not_used() -> None:
    assert speed_up(0.99, small_cpu, per_round=1.0) > 0.93


def test_what_a_drafter_takes_is_no_part_of_what_a_steps_rows_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be paid twice, and drafters that take time would draft less than pays."""
    now = 0.0
    steps: list[tuple[int, float]] = []
    rounds: list[float] = []

    class Slow(Knowing):
        is_free = False

        def draft(self, asks: Sequence[DraftRequest]) -> list[Draft]:
            nonlocal now
            now += 5
            return super().draft(asks)

    class Noting(FixedControl):
        def note_step(self, n_rows: int, seconds: float, **_more: Any) -> None:
            steps.append((n_rows, seconds))

        def note_plan(self, n_rows: int, seconds: float, **_more: Any) -> None:
            steps.append((n_rows, seconds))

        def note_drafting(self, drafter: str, n_rounds: int, seconds: float) -> None:
            rounds.append(seconds)

    with LLM(bundled_draft_path(), n_ctx=96, devices="cpu") as llm, stepped_by_hand(llm):
        engine, prompt = llm._loaded.engine, (5, 9, 9, 7)
        params = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)
        drafter = Slow(right, engine.n_vocab)
        drafter.answers[prompt] = tuple(serve(engine, [prompt], [params])[0].generated)

        def timing(run: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*given: Any) -> Any:
                nonlocal now
                now += 1
                return run(*given)

            return timed

        for owner, name in ((Runner, "run"), (SteadyRun, "run"), (SteadyRun, "run_rows")):
            monkeypatch.setattr(owner, name, timing(getattr(owner, name)))
        engine._clock = lambda: now
        engine.speculator = Speculator(
            [drafter],
            spec="lookup",
            draft_max=3,
            n_vocab=engine.n_vocab,
            control=Noting(),
            clock=lambda: now,
        )
        serve(engine, [prompt], [params])
    assert rounds == [5.0] * 4
    assert [step for step in steps if step[0] == 4] == [(4, 1.0)] * 4


def test_rows_go_to_the_requests_whose_drafts_survive() -> None:
    control = AdaptiveControl({"lookup": (0.6,)})
    good, bad = request(), request()
    draft = Draft((0,) * DRAFT_MAX, "lookup")
    for _ in range(20):
        control.note_draft(good, draft, 15, is_rejected=False)
        control.note_draft(bad, draft, 0, is_rejected=True)
        for n_rows in (2, 8, 16, 32):
            control.note_step(n_rows, flat(n_rows))
    found = control.allot({bad: draft, good: draft}, 2, 62)
    assert len(found[good].tokens) == DRAFT_MAX
    assert bad not in found or len(found[bad].tokens) < 3


def test_costs_between_measured_rows_are_interpolated() -> None:
    costs = StepCosts()
    for _ in range(3):
        costs.note(1, 1.0)
        costs.note(8, 2.0)
    assert costs.seconds(1) == 1.0
    assert costs.seconds(8) == 2.0
    assert 1.0 < costs.seconds(4) < 2.0
    assert costs.seconds(16) > 2.0


def test_one_slow_step_does_not_make_a_bucket_expensive() -> None:
    costs = StepCosts()
    for seconds in (1.0, 1.0, 1.0, 1.0):
        costs.note(1, seconds)
    for seconds in (50.0, 1.5, 1.5):
        costs.note(8, seconds)
    assert costs.seconds(8) == 1.5


def test_costs_of_many_numbers_of_rows_are_those_of_each() -> None:
    costs = StepCosts()
    assert costs.seconds_from(3, 4) == [costs.seconds(n) for n in (3, 4, 5, 6)]
    for n_rows, seconds in ((2, 1.0), (4, 1.5), (16, 4.0), (64, 9.0)):
        for _ in range(3):
            costs.note(n_rows, seconds)
    for stride in (1, 3, 8):
        expected = [costs.seconds(n) for n in range(1, 1 + 40 * stride, stride)]
        assert costs.seconds_from(1, 40, stride) == expected


@pytest.mark.parametrize("n_rows", [1, 3, 8])
def test_no_draft_pays_whose_tokens_are_less_likely_than_the_cheapest_row(n_rows: int) -> None:
    costs = StepCosts()
    for rows, seconds in ((1, 1.0), (3, 1.1), (8, 2.0), (16, 2.1), (32, 5.0)):
        for _ in range(8):
            costs.note(rows, seconds)
    price = costs.row_price(n_rows, 1.05)
    base = n_rows / costs.seconds(n_rows)
    rates = [(n_rows + n * price) / costs.seconds(n_rows + n) for n in range(1, 33 - n_rows)]
    assert max(rates) <= base * 1.05 * 1.001  # such rows never pay
    assert max(rates) > base * 1.04  # and slightly better ones would


def test_texts_that_go_on_as_drafted_or_not_at_all_are_not_taken_for_better_than_they_are() -> None:
    """One draft in three is right to the end, the others are wrong at once: rates alone would let expect more."""
    control, each, draft = AdaptiveControl({"lookup": (0.6,)}), request(), Draft((0,) * 7, "lookup")
    by_rate, expected = [], []
    for number in range(300):
        n_right = 7 if number % 3 == 0 else 0
        rate = control.acceptance.rate(each, "lookup", 0)
        by_rate.append(sum(rate**i for i in range(1, 8)))
        expected.append(control.acceptance.chance(each, "lookup", 0)[1] * by_rate[-1])
        control.note_draft(each, draft, n_right, not n_right)
    assert sum(by_rate[30:]) / 270 > 2.6
    assert sum(expected[30:]) / 270 == pytest.approx(7 / 3, rel=0.08)
