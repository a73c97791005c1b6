"""Several answers to one prompt, and what bounds an answer: fewest tokens, time, salts of the prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.by_hand import stepped_by_hand

from motley import LLM, SamplingParams
from motley.errors import RequestError

PROMPT = "Once upon a time there was a fox who lived near the river and had a red kite. One day"


@pytest.fixture(scope="module")
def llm(bundled: Path) -> Iterator[LLM]:
    with LLM(bundled, n_ctx=256, n_parallel=4) as llm:
        yield llm


def test_answers_are_those_of_derived_seeds(llm: LLM) -> None:
    answers: Any = llm.generate(PROMPT, n=3, seed=7, max_tokens=8)
    assert len({answer.tokens for answer in answers}) == 3
    again: Any = llm.generate(PROMPT, n=3, seed=7, max_tokens=8)
    assert [a.tokens for a in again] == [a.tokens for a in answers]
    each = SamplingParams(n=3, seed=7, max_tokens=8).choices()
    assert [llm.generate(PROMPT, params=own).tokens for own in each] == [a.tokens for a in answers]
    assert each[0].seed == 7
    assert len({own.seed for own in each}) == 3


def test_answers_without_a_seed_differ(llm: LLM) -> None:
    answers: Any = llm.generate(PROMPT, n=4, max_tokens=12, temperature=1.5)
    assert len({answer.tokens for answer in answers}) > 1


def test_the_prompt_is_computed_once(llm: LLM) -> None:
    answers: Any = llm.generate(PROMPT, n=4, max_tokens=4, cache_salt="computed once")
    n_prompt = answers[0].timings.prompt_tokens
    assert [a.timings.cached_tokens for a in answers] == [0] + [n_prompt - 1] * 3


def test_a_list_of_prompts_has_lists_of_answers(llm: LLM) -> None:
    params = [SamplingParams(n=2, max_tokens=3), SamplingParams(max_tokens=2)]
    two, one = llm.generate(["One", "Two"], params=params)
    assert [len(answer.tokens) for answer in two] == [3, 3]  # type: ignore[attr-defined]
    assert len(one.tokens) == 2
    both = asyncio.run(llm.agenerate("One", n=2, max_tokens=3))
    assert [len(answer.tokens) for answer in both] == [3, 3]


def test_followers_go_on_when_their_leader_ends_early(llm: LLM) -> None:
    engine = llm._loaded.engine
    params = SamplingParams(max_tokens=3, temperature=0)
    wanted = llm.generate(PROMPT, params=params).tokens
    with stepped_by_hand(llm) as step:
        leader = engine.new_request(llm.tokenizer.encode(PROMPT), params)
        follower = engine.new_request(llm.tokenizer.encode(PROMPT), params, leader=leader)
        llm._service.submit(leader)
        llm._service.submit(follower)
        assert llm._call(lambda: engine.has_work)
        llm._service.cancel(leader)
        assert llm._call(lambda: engine.has_work)
        step(5)
        assert leader.finish_reason == "cancelled"
        assert tuple(follower.generated) == wanted
        assert not llm._call(lambda: engine.has_work)


def test_a_follower_can_be_cancelled_while_it_waits(llm: LLM) -> None:
    engine = llm._loaded.engine
    params = SamplingParams(max_tokens=3)
    with stepped_by_hand(llm) as step:
        leader = engine.new_request(llm.tokenizer.encode(PROMPT), params)
        follower = engine.new_request(llm.tokenizer.encode(PROMPT), params, leader=leader)
        llm._service.submit(leader)
        llm._service.submit(follower)
        llm._service.cancel(follower)
        step(4)
        assert follower.finish_reason == "cancelled"
        assert leader.finish_reason == "length"


def test_closing_ends_followers_too(bundled: Path) -> None:
    llm = LLM(bundled, n_ctx=64)
    engine = llm._loaded.engine
    with stepped_by_hand(llm):
        leader = engine.new_request([5, 6], SamplingParams())
        follower = engine.new_request([5, 6], SamplingParams(), leader=leader)
        llm._service.submit(leader)
        llm._service.submit(follower)
        llm.close()
    assert leader.finish_reason == follower.finish_reason == "failed"


def test_without_a_prefix_cache_answers_do_not_wait_for_each_other(bundled: Path) -> None:
    with LLM(bundled, n_ctx=64, prefix_cache=False) as llm:
        answers: Any = llm.generate("One day", n=3, seed=1, max_tokens=3)
        assert [a.timings.cached_tokens for a in answers] == [0, 0, 0]


def test_a_stream_is_one_answer(llm: LLM) -> None:
    for call in (llm.stream, llm.astream):
        with pytest.raises(RequestError, match="one answer"):
            call(PROMPT, n=2)


def test_prefixes_are_shared_only_within_a_salt(llm: LLM) -> None:
    def n_cached(**options: Any) -> int:
        return llm.generate(PROMPT, max_tokens=1, **options).timings.cached_tokens

    n_cached()
    n_prompt = len(llm.tokenizer.encode(PROMPT))
    assert n_cached() == n_prompt - 1
    assert n_cached(cache_salt="a") == 0
    assert n_cached(cache_salt="a") == n_prompt - 1
    assert n_cached(cache_salt="b") == 0
    assert n_cached(cache_salt="") == 0
    assert n_cached(cache_prompt=False) == 0
    assert n_cached() == n_prompt - 1
    assert n_cached(cache_salt="a", cache_prompt=False) == 0


def test_salts_and_prompts_do_not_change_the_answer(llm: LLM) -> None:
    plain = llm.generate(PROMPT, max_tokens=8, seed=3).tokens
    assert llm.generate(PROMPT, max_tokens=8, seed=3, cache_salt="x").tokens == plain
    assert llm.generate(PROMPT, max_tokens=8, seed=3, cache_prompt=False).tokens == plain


def test_no_end_before_the_fewest_tokens(llm: LLM) -> None:
    ends = dict.fromkeys(llm.tokenizer.eog_ids, 50.0)
    assert llm.generate(PROMPT, max_tokens=20, logit_bias=ends).tokens == ()
    answer = llm.generate(PROMPT, max_tokens=20, min_tokens=6, logit_bias=ends)
    assert len(answer.tokens) == 6
    assert answer.finish_reason == "stop"
    stop = frozenset(range(1000, 4000))
    assert len(llm.generate(PROMPT, max_tokens=20, min_tokens=5, stop_token_ids=stop, seed=1).tokens) >= 5


def test_a_constraint_that_is_fulfilled_ends_an_answer_below_its_fewest_tokens(llm: LLM) -> None:
    answer = llm.generate(PROMPT, regex="ab", min_tokens=10)
    assert answer.text == "ab"
    assert len(llm.generate(PROMPT, regex="[ab]+", min_tokens=10, max_tokens=12).tokens) >= 10


def test_a_time_limit_ends_an_answer_after_a_token(llm: LLM) -> None:
    answer = llm.generate(PROMPT, max_seconds=1e-9, max_tokens=50)
    assert len(answer.tokens) == 1
    assert answer.finish_reason == "length"
    assert len(llm.generate(PROMPT, max_seconds=1e9, max_tokens=5, ignore_eos=True).tokens) == 5


@pytest.mark.parametrize(
    "options",
    [{"n": 0}, {"n": 129}, {"n": True}, {"min_tokens": -1}, {"min_tokens": 5, "max_tokens": 4}, {"max_seconds": 0},
     {"max_seconds": float("nan")}, {"cache_salt": 3}, {"cache_salt": "x" * 2000}, {"cache_prompt": 0}],
    ids=str,
)  # fmt: skip
def test_impossible_limits_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        SamplingParams(**options)
