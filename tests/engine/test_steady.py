"""The steady state: repeated steps give the tokens of scheduled ones, whatever comes in between."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from by_hand import stepped_by_hand
from drafters import Guess, give, half, now_and_then, right, wrong
from drafters import serve as serve_checked
from faults import Faults

from motley import LLM
from motley.bundled import bundled_experts_path
from motley.engine import Engine, Request, SamplingParams
from motley.engine.drafting.control import Drafts, FixedControl
from motley.engine.steady import Steady
from motley.engine.verifying import DraftVerification
from motley.errors import DeviceError
from motley.kvcache.leases import Lease
from motley.runtime import Batch, Chunk, Runner, SteadyRun
from thorough import first

CREWS: dict[str, dict[str, Any]] = {
    "one": {},
    "tensor": {"devices": "cpu,cpu", "split_mode": "tensor"},
    "layer": {"devices": "cpu,cpu", "split_mode": "layer"},
    "small blocks": {"kv_block_size": 2, "cache_type_k": "q8_0"},
    "demand paged": {"kv_cache_demand_paged": True, "kv_block_size": 8},
    "full cache": {"kv_cache_tokens": 160, "kv_block_size": 8},
}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of requests of all steady runs."""
    sizes: list[int] = []
    run = SteadyRun.run

    def watched(self: SteadyRun, tokens: list[int], *others: Any) -> list[list[int]]:
        rounds = run(self, tokens, *others)
        sizes.extend(map(len, rounds))
        return rounds

    monkeypatch.setattr(SteadyRun, "run", watched)
    return sizes


def load(path: Path, **options: Any) -> LLM:
    return LLM(path, **({"n_ctx": 128, "n_parallel": 4, "n_batch": 32, "n_threads": 2} | options))


@pytest.fixture
def n_rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rounds of all steady runs."""
    counts: list[int] = []
    run = SteadyRun.run

    def watched(self: SteadyRun, *given: Any) -> list[list[int]]:
        rounds = run(self, *given)
        counts.append(len(rounds))
        return rounds

    monkeypatch.setattr(SteadyRun, "run", watched)
    return counts


def serve(
    own: Engine, rng: random.Random, n_steps: int = 320, seconds: float = 0.0
) -> list[tuple[int, ...] | None]:
    """The answers to random requests, which come, stop, shift, draft and are cancelled; None: cancelled."""
    requests: list[Request] = []
    cancelled: set[int] = set()
    for step in range(n_steps):
        if step < n_steps // 2 and rng.random() < 0.2:
            prompt = [1, *(rng.randrange(3, 500) for _ in range(rng.randint(1, 40)))]
            params = SamplingParams(
                max_tokens=rng.choice([1, 2, rng.randint(3, 60)]),
                temperature=rng.choice([0.0, 0.8]),
                seed=rng.randrange(9),
                stop_token_ids=frozenset(range(3, 40)) if rng.random() < 0.2 else frozenset(),
                stop=("and",) if rng.random() < 0.2 else (),
                ignore_eos=rng.random() < 0.5,
                speculative=rng.choice(["off", "auto"]),
                logprobs=1 if rng.random() < 0.05 else None,
                repeat_penalty=1.3 if rng.random() < 0.05 else 1.0,
                min_tokens=int(rng.random() < 0.05),
            )
            requests.append(own.add(prompt, params))
        if requests and rng.random() < 0.04:
            number = rng.randrange(len(requests))
            cancelled.add(number)
            own.cancel(requests[number])
        if rng.random() < 0.03:
            own.preempt()
        if own.can_step:
            own.step(seconds)
        own.cache.check_integrity()
    while own.has_work:
        own.step(seconds)
    own.cache.check_integrity()
    assert own.cache.stats().n_sequences == 0
    assert own._steady is None, "it would keep finished requests"
    return [None if i in cancelled else tuple(r.generated) for i, r in enumerate(requests)]


@pytest.mark.parametrize("crew", CREWS)
@pytest.mark.parametrize("seed", first(1, range(4)))
def test_answers_are_those_of_an_engine_that_repeats_nothing(
    bundled: Path, crew: str, seed: int, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(bundled, **CREWS[crew]) as llm:
        answers = serve(llm._loaded.engine, random.Random(seed))
    n_steady = len(counted)
    assert n_steady > 20
    monkeypatch.setattr(Runner, "steady", lambda *_: None)
    with load(bundled, **CREWS[crew]) as llm:
        assert serve(llm._loaded.engine, random.Random(seed)) == answers
    assert len(counted) == n_steady


@pytest.mark.parametrize("crew", CREWS)
@pytest.mark.parametrize("seed", first(1, range(4)))
def test_answers_are_the_same_if_a_call_computes_several_steps(
    bundled: Path, crew: str, seed: int, n_rounds: list[int]
) -> None:
    with load(bundled, **CREWS[crew]) as llm:
        answers = serve(llm._loaded.engine, random.Random(seed))
    assert set(n_rounds) == {1}
    with load(bundled, **CREWS[crew]) as llm:
        assert serve(llm._loaded.engine, random.Random(seed), seconds=60) == answers
    assert max(n_rounds) > 1


@pytest.fixture
def n_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of all repeated steps with drafts."""
    counts: list[int] = []
    run_rows = SteadyRun.run_rows

    def watched(self: SteadyRun, tokens: list[int], *others: Any) -> list[int]:
        chosen = run_rows(self, tokens, *others)
        counts.append(len(chosen))
        return chosen

    monkeypatch.setattr(SteadyRun, "run_rows", watched)
    return counts


def answers_with_drafts(llm: LLM, guess: Guess, n_tokens: int = 40) -> list[tuple[int, ...]]:
    """The answers of four requests whose drafter knows them, and guesses as `guess` does."""
    params = [
        SamplingParams(
            max_tokens=n_tokens - 3 * i,
            temperature=0.8 * (i % 2),
            seed=i,
            ignore_eos=True,
            stop=("q",) if i == 3 else (),
        )
        for i in range(4)
    ]
    prompts = [[1, 50 + i, 60, *range(70, 70 + 3 * i)] for i in range(4)]
    drafter = give(llm, guess)
    engine = llm._loaded.engine
    known = serve_checked(engine, prompts, [replace(each, speculative="off") for each in params])
    texts = [tuple(request.generated) for request in known]
    drafter.answers |= dict(zip(map(tuple, prompts), texts, strict=True))
    found = [tuple(request.generated) for request in serve_checked(engine, prompts, params)]
    assert found == texts
    return texts


@pytest.mark.parametrize("crew", CREWS)
@pytest.mark.parametrize(
    "guess", first(1, [half, right, wrong, now_and_then]), ids=lambda guess: guess.__name__
)
def test_drafts_in_repeated_steps_change_no_answer(
    bundled: Path, crew: str, guess: Guess, n_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(bundled, **CREWS[crew]) as llm, stepped_by_hand(llm):
        answers = answers_with_drafts(llm, guess)
    assert len(n_rows) > 2
    assert max(n_rows) > 8
    n_rows.clear()
    monkeypatch.setattr(Runner, "steady", lambda *_: None)
    with load(bundled, **CREWS[crew]) as llm, stepped_by_hand(llm):
        assert answers_with_drafts(llm, guess) == answers
    assert not n_rows


def test_drafts_in_repeated_steps_beside_windows(random_gemma3: Path, n_rows: list[int]) -> None:
    with load(random_gemma3, kv_block_size=4) as llm, stepped_by_hand(llm):
        answers_with_drafts(llm, half, 60)
    assert len(n_rows) > 10


def test_drafts_in_repeated_steps_use_each_requests_number_of_experts(n_rows: list[int]) -> None:
    with load(bundled_experts_path()) as llm, stepped_by_hand(llm):
        drafter = give(llm, right)
        engine = llm._loaded.engine
        params = [
            SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, n_expert_used=n)
            for n in (1, 2, None)
        ]
        prompts = [[1, 50 + i, 60] for i in range(3)]
        without = [replace(each, speculative="off") for each in params]
        texts = [tuple(r.generated) for r in serve_checked(engine, prompts, without)]
        drafter.answers |= dict(zip(map(tuple, prompts), texts, strict=True))
        assert [tuple(r.generated) for r in serve_checked(engine, prompts, params)] == texts
    assert len(n_rows) > 1


@pytest.mark.parametrize("after", [False, True], ids=["before its work", "after its work"])
@pytest.mark.parametrize("error", [DeviceError, MemoryError, KeyboardInterrupt])
def test_a_repeated_step_with_drafts_that_fails_is_computed_again(
    bundled: Path, error: type[BaseException], after: bool
) -> None:
    prompts = [[1, 40 + i, 50] for i in range(3)]
    params = [SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)] * 3
    places = [
        (SteadyRun, "run_rows"),
        (SteadyRun, "has_rows"),
        (Lease, "reserve"),
        (DraftVerification, "begin_chosen"),
    ]
    with load(bundled, kv_block_size=4, n_threads=1) as llm, stepped_by_hand(llm):
        own = llm._loaded.engine
        give(llm, right)
        texts = [tuple(r.generated) for r in serve_checked(own, prompts, params)]
        for owner, name in places:
            faults = Faults(name, [(owner, name)], after=after)
            for n in (1, 2):
                drafter = give(llm, half, seed=n)
                drafter.answers |= dict(zip(map(tuple, prompts), texts, strict=True))
                with faults.armed(n, error("injected")):
                    requests = [own.add(*each) for each in zip(prompts, params, strict=True)]
                    while own.has_work:
                        own.step()
                        own.cache.check_integrity()
                assert [tuple(r.generated) for r in requests] == texts
                assert faults.n_calls >= n, "nothing has failed"
                assert own.cache.stats().n_sequences == 0


def test_a_request_without_a_token_after_its_draft_fails_alone(
    bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[1, 50 + i, 60] for i in range(2)]
    params = [SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)] * 2
    with load(bundled) as llm, stepped_by_hand(llm):
        own = llm._loaded.engine
        drafter = give(llm, right)
        texts = [tuple(r.generated) for r in serve_checked(own, prompts, params)]
        drafter.answers |= dict(zip(map(tuple, prompts), texts, strict=True))
        run_rows = SteadyRun.run_rows

        def broken(self: SteadyRun, tokens: list[int], counts: list[int], *others: Any) -> list[int]:
            chosen = run_rows(self, tokens, counts, *others)
            return [*chosen[: counts[0] - 1], -2, *chosen[counts[0] :]] if len(counts) == 2 else chosen

        monkeypatch.setattr(SteadyRun, "run_rows", broken)
        requests = [own.add(*each) for each in zip(prompts, params, strict=True)]
        while own.has_work:
            own.step()
            own.cache.check_integrity()
        assert requests[0].finish_reason == "failed"
        assert tuple(requests[0].generated) == texts[0][: requests[0].n_generated]
        assert tuple(requests[1].generated) == texts[1]


def test_each_round_counts_as_a_run(bundled: Path, n_rounds: list[int]) -> None:
    """A server's figures call them steps: how many requests a step had on average, for example."""
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, speculative="off")
    with load(bundled) as llm:
        own = llm._loaded.engine
        request = own.add([1, 50, 60], params)
        while own.has_work:
            own.step(60.0)
        assert own.runner.n_runs == request.n_steps == 20
        assert max(n_rounds) > 1


def test_a_call_ends_with_the_round_in_which_a_request_ends(bundled: Path, n_rounds: list[int]) -> None:
    free = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, speculative="off")
    with load(bundled) as llm:
        own = llm._loaded.engine
        alone = own.add([1, 50, 60], free)
        while own.has_work:
            own.step()
        *_, stop = sorted(
            alone.generated, key=alone.generated.index
        )  # the last one to come for the first time
        n_rounds.clear()
        stopped = own.add([1, 50, 60], replace(free, stop_token_ids=frozenset({stop})))
        beside = own.add([1, 50, 60], free)
        while own.has_work:
            own.step(60.0)
            own.cache.check_integrity()
        assert stopped.generated == alone.generated[: alone.generated.index(stop)]
        assert beside.generated == alone.generated
        assert sum(n_rounds) <= len(alone.generated)  # no round was computed for nothing
        assert max(n_rounds) > 1


def test_a_text_that_ends_in_a_round_drops_the_others(bundled: Path, n_rounds: list[int]) -> None:
    """A stop string is found in the text, which the native call does not know."""
    free = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, speculative="off")
    with load(bundled) as llm:
        own = llm._loaded.engine
        texts = []
        for seconds in (0.0, 60.0):
            whole = own.add([1, 50, 60], free)
            while own.has_work:
                own.step(seconds)
            end = whole.outbox.result().text[12:16]
            requests = [own.add([1, 50, 60], replace(free, stop=(end,))), own.add([1, 50, 60], free)]
            while own.has_work:
                own.step(seconds)
                own.cache.check_integrity()
            texts.append([whole.generated, *(request.generated for request in requests)])
        assert texts[0] == texts[1]
        assert len(texts[0][1]) < len(texts[0][0])
        assert max(n_rounds) > 1


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_text_that_ends_in_the_first_round_of_a_call_drops_the_others(
    bundled: Path, n_rounds: list[int], prefix_cache: bool
) -> None:
    free = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, speculative="off")
    with load(bundled, prefix_cache=prefix_cache) as llm:
        own = llm._loaded.engine
        requests = [own.add([1, 50, 60], free) for _ in range(2)]
        while own._steady is None:
            own.step()
        push = requests[0].text.push

        def stopping(token: int) -> str:
            requests[0].text.is_stopped = True
            return push(token)

        requests[0].text.push = stopping  # type: ignore[method-assign]
        n_before = requests[0].n_generated
        own.step(60.0)
        own.cache.check_integrity()
        assert n_rounds[-1] > 1
        assert requests[0].finish_reason == "stop"
        assert requests[0].n_generated == n_before + 1
        while own.has_work:
            own.step(60.0)
            own.cache.check_integrity()
        assert requests[1].generated[: n_before + 1] == requests[0].generated
        assert not any(request.n_retries for request in requests)


def test_any_number_of_stop_tokens_may_be_given_and_unknown_ones_do_nothing(
    bundled: Path, n_rounds: list[int]
) -> None:
    free = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, speculative="off")
    with load(bundled) as llm:
        own = llm._loaded.engine
        alone = own.add([1, 50, 60], free)
        while own.has_work:
            own.step()
        n_rounds.clear()
        *_, stop = sorted(alone.generated, key=alone.generated.index)
        others = set(range(own.n_vocab)).difference(alone.generated)
        for stops in ([2**31, 2**63 - 1], [*others, stop]):
            request = own.add([1, 50, 60], replace(free, stop_token_ids=frozenset(stops), min_tokens=1))
            while own.has_work:
                own.step(60.0)
            n = alone.generated.index(stop) if stop in stops else None
            assert request.generated == alone.generated[:n]
            assert not request.n_retries
        assert max(n_rounds) > 1


def test_windows_drop_their_blocks_in_repeated_steps(
    random_gemma3: Path, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers() -> tuple[list[tuple[int, ...]], int]:
        with load(random_gemma3, kv_block_size=4) as llm:
            own = llm._loaded.engine
            params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, speculative="off")
            requests = [own.add([2, 7 + i, 9], params) for i in range(3)]
            max_used = 0
            while own.has_work:
                own.step()
                own.cache.check_integrity()
                max_used = max(max_used, own.cache.stats().groups[-1].n_used)
            return [tuple(r.generated) for r in requests], max_used

    repeated = answers()
    assert sum(counted) > 150
    monkeypatch.setattr(Runner, "steady", lambda *_: None)
    assert answers() == repeated


def test_a_sequence_that_comes_in_between_ends_the_lease_and_not_the_steady_state(
    bundled: Path, counted: list[int]
) -> None:
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, speculative="off")
    with load(bundled, kv_block_size=4) as llm:
        own = llm._loaded.engine
        alone = own.add([1, 50, 60], params)
        while own.has_work:
            own.step()
        n_alone = len(counted)
        beside = own.add([1, 50, 60], params)
        while own.has_work:
            own.step()
            for seq in [own.cache.open([5, 6, 7]).seq]:  # takes and frees blocks
                assert own.cache.reserve(seq, 9) is not None
                own.cache.free(seq, copies_done=False)
            llm._loaded.cache.check_integrity()
        assert beside.generated == alone.generated
        assert len(counted) == 2 * n_alone >= 50


@pytest.fixture(scope="module")
def small(bundled: Path) -> Iterator[LLM]:
    with load(bundled, n_ctx=24, kv_block_size=4, kv_cache_demand_paged=True, n_threads=1) as llm:
        yield llm


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["one round", "rounds"])
@pytest.mark.parametrize("after", [False, True], ids=["before its work", "after its work"])
@pytest.mark.parametrize("error", [DeviceError, MemoryError, KeyboardInterrupt])
def test_a_repeated_step_that_fails_is_computed_again(
    small: LLM, error: type[BaseException], after: bool, seconds: float
) -> None:
    own = small._loaded.engine
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, speculative="off")

    def answers() -> list[tuple[int, ...]]:
        requests = [own.add([1, 40 + i, 50], params) for i in range(3)]
        while own.has_work:
            own.step(seconds)
        return [request.outbox.result().require().tokens for request in requests]

    undisturbed = answers()
    places = [(SteadyRun, "run"), (SteadyRun, "place"), (Lease, "append")]
    for owner, name in places:
        faults = Faults(name, [(owner, name)], after=after)
        for n in (1, 2, 3):
            with faults.armed(n, error("injected")):
                assert answers() == undisturbed
                assert faults.n_calls >= n, "nothing has failed"
            own.cache.check_integrity()
            assert own.cache.stats().n_sequences == 0


def test_a_request_without_a_token_fails_alone(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, speculative="off")
    with load(bundled) as llm:
        own = llm._loaded.engine
        requests = [own.add([1, 50 + i, 60], params) for i in range(2)]
        while own._steady is None:
            own.step()
        run = SteadyRun.run
        monkeypatch.setattr(SteadyRun, "run", lambda *given: [[-2, *run(*given)[0][1:]]])
        own.step()
        monkeypatch.setattr(SteadyRun, "run", run)
        while own.has_work:
            own.step()
        assert requests[0].finish_reason == "failed"
        assert requests[1].finish_reason == "length"
        with pytest.raises(Exception, match="logits contain nan"):
            requests[0].outbox.result().require()


def run_large_batch(own: Engine) -> None:
    seq = own.cache.open().seq
    assert own.cache.reserve(seq, 200) == []
    batch = own.runner.place(Batch.of([Chunk(seq, 0, 200, 1)]), own.cache)
    own.runner.run(batch, [7] * 200, ())
    own.cache.free(seq, copies_done=False)


def test_a_plan_for_more_rows_may_move_activations_in_between(bundled: Path, counted: list[int]) -> None:
    """A steady batch has addresses of activations. When a larger plan moves them, another batch is made."""
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, speculative="off")
    with load(bundled, n_ctx=512, n_batch=256) as llm:
        own = llm._loaded.engine
        alone = own.add([1, 50, 60], params)
        while own.has_work:
            own.step()
    with load(bundled, n_ctx=512, n_batch=256) as llm:
        own = llm._loaded.engine
        request = own.add([1, 50, 60], params)
        made: list[Steady] = []
        while own.has_work:
            own.step()
            if own._steady is not None and own._steady not in made:
                made.append(own._steady)
            if request.n_generated == 10:
                run_large_batch(own)
        assert request.generated == alone.generated
        assert len(made) == 2


class _NoRows(FixedControl):
    """Asks for drafts and uses none of them."""

    def allot(self, *_: Any) -> Drafts:
        return {}


def test_a_lease_that_an_unused_draft_has_ended_is_renewed(bundled: Path, counted: list[int]) -> None:
    """Early exit reserves slots for its drafts, in blocks that the lease does not know."""
    with load(bundled, kv_block_size=2) as llm:
        llm._loaded.engine.speculator._control = _NoRows()
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
        without = llm.generate([5, 6, 7], speculative="off", **options)
        counted.clear()
        found = llm.generate([5, 6, 7], speculative="exit", **options)
        assert found.tokens == without.tokens
        assert not found.timings.n_retries
        assert len(counted) > 15


def test_a_plan_of_an_unused_draft_may_move_activations(
    bundled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, but between the check of a repeated step and its run: it would write to memory that is freed."""
    run, currents, n_rounds = SteadyRun.run, list[bool](), list[int]()

    def checked(self: SteadyRun, *inputs: Any) -> list[list[int]]:
        currents.append(self.is_current)
        assert self.is_current  # not only at the end: the process might be gone by then
        rounds = run(self, *inputs)
        n_rounds.append(len(rounds))
        return rounds

    monkeypatch.setattr(SteadyRun, "run", checked)
    with load(bundled, n_ctx=512, n_batch=256) as llm:
        own = llm._loaded.engine

        class Computing(_NoRows):
            def allot(self, drafts: Any, *_: Any) -> Drafts:
                if any(request.n_generated == 10 for request in drafts):
                    run_large_batch(own)
                return {}

        own.speculator._control = Computing()
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
        without = llm.generate([1, 50, 60], speculative="off", **options)
        found = llm.generate([1, 50, 60], speculative="lookahead", **options)
        assert found.tokens == without.tokens
        assert not found.timings.n_retries
        assert all(currents)
        assert sum(n_rounds) > 30


@pytest.mark.parametrize(("n_parallel", "n_batch"), [(1, 1), (4, 4)])
def test_a_step_with_one_token_of_a_longer_prompt_is_not_repeated(
    bundled: Path, n_parallel: int, n_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[BaseException] = []
    recover = Engine._recover

    def noted(engine: Engine, error: BaseException) -> None:
        failed.append(error)
        recover(engine, error)

    monkeypatch.setattr(Engine, "_recover", noted)
    prompts = [f"The cat {n} sat on the mat and looked at " * (1 + n % 3) for n in range(2 * n_parallel)]
    params = [
        SamplingParams(temperature=0, max_tokens=5 + 3 * n, ignore_eos=True) for n in range(len(prompts))
    ]
    with load(bundled, n_ctx=256, n_parallel=n_parallel, n_batch=n_batch) as llm:
        for _ in range(2):
            answers = llm.generate(prompts, params=params)
            assert [answer.finish_reason for answer in answers] == ["length"] * len(prompts)
    assert not failed
