"""Drafts change how many tokens a step gives, never the text: for drafters that are right, wrong, or both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import stepped_by_hand
from drafters import GUESSES, Guess, give, half, right, serve, too_long, wrong

from motley import LLM
from motley.bundled import bundled_draft_path
from motley.engine import Completion, SamplingParams
from motley.engine.noise import gumbel
from random_models import GEMMA3

CREWS: dict[str, dict[str, Any]] = {
    "cpu": {"devices": "cpu"},
    "tensor": {"devices": "cpu,cpu", "split_mode": "tensor", "tensor_split": (3, 1)},
    "layer": {"devices": "cpu,cpu", "split_mode": "layer"},
}
PROMPTS = [list(range(3, 40)), [5, 9, 9, 7], list(range(60, 3, -2)), [200, 100]]
N_NEW = 22


@pytest.fixture(scope="module")
def small() -> Path:
    """A trained model of a million weights in Q8_0. Its logits do not depend on the number of rows, to the bit."""
    return bundled_draft_path()


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights in Q8_0; five of six layers see 32 tokens."""
    return GEMMA3.write(tmp_path_factory.mktemp("models") / "gemma3-q8_0.gguf", is_q8_0=True)


def params_of(greedy: bool) -> list[SamplingParams]:
    """The same number of tokens for each prompt, chosen in different ways."""
    if greedy:
        return [
            SamplingParams(temperature=0, max_tokens=N_NEW, ignore_eos=True),
            SamplingParams(temperature=0, max_tokens=N_NEW, ignore_eos=True, repeat_penalty=1.3),
            SamplingParams(temperature=0, max_tokens=N_NEW + 9, ignore_eos=True, presence_penalty=0.5),
            SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        ]
    return [
        SamplingParams(seed=1, max_tokens=N_NEW, ignore_eos=True),
        SamplingParams(seed=2, max_tokens=N_NEW, temperature=1.2, top_k=0, top_p=0.9, ignore_eos=True),
        SamplingParams(
            seed=3, max_tokens=N_NEW + 9, frequency_penalty=0.4, repeat_last_n=-1, ignore_eos=True
        ),
        SamplingParams(seed=4, max_tokens=3, typical_p=0.7, ignore_eos=True),
    ]


def load(path: Path, **options: Any) -> LLM:
    return LLM(path, **({"n_ctx": 160, "n_batch": 64, "n_parallel": 4, "kv_block_size": 16} | options))


@contextmanager
def by_hand(path: Path, **options: Any) -> Iterator[LLM]:
    """The model with an engine that takes its steps only when the test calls `step`."""
    with load(path, **options) as llm, stepped_by_hand(llm):
        yield llm


def answers(
    llm: LLM, params: Sequence[SamplingParams], guess: Guess | None, known: Sequence[tuple[int, ...]] = ()
) -> tuple[list[tuple[int, ...]], list[int]]:
    """The tokens of all answers, and how many drafted tokens were right in each draft."""
    engine = llm._loaded.engine
    drafter = give(llm, guess or right)
    for prompt, answer in zip(PROMPTS, known, strict=False):
        drafter.answers[tuple(prompt)] = answer
    requests = serve(engine, PROMPTS, params)
    return [tuple(request.generated) for request in requests], drafter.n_accepted


def check(llm: LLM, *, is_exact: bool = True) -> set[int]:
    """Compares texts for all drafters. Returns the acceptance lengths that occurred."""
    lengths: set[int] = set()
    for greedy in (True, False):
        params = params_of(greedy)
        without, drafts = answers(llm, params, None)  # it knows no answers, so it has no drafts
        assert not drafts
        for guess in GUESSES:
            found, counts = answers(llm, params, guess, without)
            lengths |= set(counts)
            for prompt, each, mine, theirs in zip(PROMPTS, params, found, without, strict=True):
                if mine != theirs:
                    assert not is_exact, (guess.__name__, each)
                    assert is_tie(llm, prompt, each, mine, theirs), (guess.__name__, each)
    return lengths


def is_tie(
    llm: LLM, prompt: list[int], params: SamplingParams, mine: tuple[int, ...], theirs: tuple[int, ...]
) -> bool:
    """Whether the first tokens that differ have nearly the same score, so that rounding decides."""
    first = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
    history = [*prompt, *mine[:first]]
    sampler = llm._loaded.engine.new_request(prompt, params).sampler
    row = torch.from_numpy(llm.logits(history)[-1].copy())
    shaped = sampler.shape(row, history).double().numpy()
    pair = np.array([mine[first], theirs[first]])
    scores = shaped[pair]
    if not params.is_greedy:
        scores = scores / params.temperature + gumbel(sampler.key, first, pair)
    return bool(abs(scores[0] - scores[1]) < 0.05)


@pytest.mark.parametrize("crew", CREWS)
def test_texts_are_the_same_on_every_crew(small: Path, crew: str) -> None:
    with by_hand(small, **CREWS[crew]) as llm:
        assert check(llm) == set(range(8))  # every acceptance length has occurred


def test_texts_are_the_same_if_all_rows_are_chosen_at_once(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where each choice is a launch."""
    monkeypatch.setattr("motley.engine.verifying._is_on_gpu", lambda _logits: True)
    with by_hand(small) as llm:
        assert check(llm) == set(range(8))


def test_constraints_and_log_probabilities_follow_drafts(bundled: Path) -> None:
    pytest.importorskip("llguidance")
    prompt = "Name and age of Ada, who is 36, as JSON:"
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    options: dict[str, Any] = {"seed": 1, "max_tokens": 40, "json_schema": schema, "logprobs": 2}
    with load(bundled) as llm:
        without = llm.generate(prompt, **options)
        for guess in (right, half, wrong):
            drafter = give(llm, guess)
            drafter.answers[tuple(llm.tokenizer.encode(prompt))] = without.tokens
            found = llm.generate(prompt, **options)
            assert outcome(found) == outcome(without)
            assert found.logprobs == without.logprobs
            assert drafter.n_accepted


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_texts_are_the_same_with_blocks_of_any_size(small: Path, block_size: int) -> None:
    with by_hand(small, kv_block_size=block_size) as llm:
        check(llm)


@pytest.mark.parametrize("kinds", [("f32", "f32"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "bf16")])
def test_texts_are_the_same_with_every_kind_of_cache(small: Path, kinds: tuple[str, str]) -> None:
    with by_hand(small, cache_type_k=kinds[0], cache_type_v=kinds[1]) as llm:
        check(llm)


def test_texts_are_the_same_without_a_prefix_cache(small: Path) -> None:
    with by_hand(small, prefix_cache=False) as llm:
        check(llm)


@pytest.mark.slow
def test_texts_are_the_same_on_the_reference_backend(small: Path) -> None:
    with by_hand(small, backend="reference") as llm:
        check(llm, is_exact=False)  # torch's products round differently for other numbers of rows


@pytest.mark.parametrize("block_size", [4, 16])
def test_texts_are_the_same_with_sliding_windows(windowed: Path, block_size: int) -> None:
    with by_hand(windowed, kv_block_size=block_size) as llm:
        check(llm)


@pytest.mark.parametrize("paging", [False, True])
def test_texts_are_the_same_when_requests_are_preempted(small: Path, paging: bool) -> None:
    """The cache has no room for all requests at once, and none for most drafts."""
    with by_hand(small, kv_cache_tokens=96, kv_cache_demand_paged=paging) as llm:
        check(llm)


def test_texts_are_the_same_in_small_batches(small: Path) -> None:
    with by_hand(small, n_batch=6) as llm:
        check(llm)


@pytest.mark.parametrize("window", [False, True], ids=["full attention", "windows"])
def test_a_context_is_shifted_at_the_same_tokens(small: Path, windowed: Path, window: bool) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, context_shift=True, n_keep=4),
        SamplingParams(seed=5, max_tokens=100, ignore_eos=True, context_shift=True, n_keep=0),
    ]
    path = windowed if window else small
    with by_hand(path, n_ctx=40, kv_block_size=4) as llm:
        engine = llm._loaded.engine
        prompts = PROMPTS[1:2] + PROMPTS[3:]
        give(llm, right)
        without = [tuple(r.generated) for r in serve(engine, prompts, params)]
        for guess in (right, half, too_long):
            drafter = give(llm, guess, draft_max=15)
            drafter.answers |= dict(zip(map(tuple, prompts), without, strict=True))
            found = [tuple(r.generated) for r in serve(engine, prompts, params)]
            assert found == without
            assert max(drafter.n_accepted) > 4


@pytest.mark.parametrize("n_keep", [2, 28])
def test_windows_drop_the_same_tokens_before_a_context_is_shifted(windowed: Path, n_keep: int) -> None:
    """Whether tokens are moved or computed again depends on what windows have dropped; logits differ slightly then."""
    prompt = list(range(5, 33))
    params = SamplingParams(
        seed=3, max_tokens=50, ignore_eos=True, context_shift=True, n_keep=n_keep, logprobs=0
    )
    with by_hand(windowed, n_ctx=48, cache_type_k="f32", cache_type_v="f32") as llm:
        engine = llm._loaded.engine
        give(llm, right)
        (without,) = serve(engine, [prompt], [params])
        for draft_max in (2, 4, 7):
            drafter = give(llm, right, draft_max=draft_max)
            drafter.answers[tuple(prompt)] = tuple(without.generated)
            (found,) = serve(engine, [prompt], [params])
            assert found.logprobs == without.logprobs
            assert max(drafter.n_accepted) == draft_max


def test_an_answer_stops_inside_a_draft(bundled: Path) -> None:
    """Stop strings, stop tokens and max_tokens end it where they end it without drafts; the text is the same."""
    with load(bundled) as llm:
        prompt = llm.tokenizer.encode("Once upon a time there was a little dog.")
        whole = llm.generate(prompt, temperature=0, max_tokens=40, ignore_eos=True)
        words = whole.text.split()
        for options in (
            {"stop": (" ".join(words[4:6]),)},
            {"stop": (words[9],)},
            {"stop_token_ids": frozenset([whole.tokens[11]])},
            {"max_tokens": 13},
            {},
        ):
            params = SamplingParams(**({"temperature": 0, "max_tokens": 40, "ignore_eos": True} | options))
            give(llm, right)
            without = llm.generate(prompt, params=params)
            drafter = give(llm, right, draft_max=9)
            drafter.answers[tuple(prompt)] = whole.tokens
            found = llm.generate(prompt, params=params)
            assert outcome(found) == outcome(without)
            assert found.timings.n_steps < without.timings.n_steps
            count = found.timings.drafts["lookup"]
            assert 0 < count.accepted <= count.drafted
            llm._call(llm._loaded.cache.check_integrity)


def outcome(completion: Completion) -> tuple[Any, ...]:
    return completion.text, completion.tokens, completion.finish_reason


def test_end_of_generation_inside_a_draft_ends_the_answer(small: Path) -> None:
    with by_hand(small) as llm:
        engine, prompt = llm._loaded.engine, llm.tokenizer.encode("Once upon a time")
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        answer = tuple(serve(engine, [prompt], [params])[0].generated)
        stops = frozenset([next(token for token in answer[3:] if token not in answer[:3])])
        drafter = give(llm, right, draft_max=15)
        drafter.answers[tuple(prompt)] = answer
        params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=stops)
        (request,) = serve(engine, [prompt], [params])
        assert request.finish_reason == "stop"
        assert request.generated == list(answer[: len(request.generated)])
        assert len(request.generated) >= 3
        assert request.n_steps == 2  # the prompt's, and one with the whole draft


def test_what_was_rejected_is_never_found_again(small: Path) -> None:
    """A later request whose prompt is the rejected draft computes it; it does not find the draft's blocks."""
    with by_hand(small, kv_block_size=4) as llm:
        engine = llm._loaded.engine
        params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)]
        drafter = give(llm, wrong, draft_max=15, seed=3)
        drafts: list[tuple[int, ...]] = []
        propose = engine.speculator.propose

        def watched(scheduler: Any) -> Any:
            found = propose(scheduler)
            drafts.extend((*r.tokens, *draft.tokens) for r, draft in found.items())
            return found

        engine.speculator.propose = watched  # type: ignore[method-assign]
        (request,) = serve(engine, [PROMPTS[0]], params)
        right_tokens = [*PROMPTS[0], *request.generated]
        assert drafts
        for text in drafts:
            opened = engine.cache.open([*text, 1])
            n_common = next(
                (i for i, (a, b) in enumerate(zip(text, right_tokens, strict=False)) if a != b), len(text)
            )
            assert opened.n_cached <= n_common
            engine.cache.reject(opened)
        assert drafter.n_accepted.count(0) > 10


def test_a_request_may_switch_speculation_off(bundled: Path) -> None:
    with load(bundled) as llm:
        prompt = llm.tokenizer.encode("Once upon a time")
        answer = llm.generate(prompt, temperature=0, max_tokens=16, ignore_eos=True)
        drafter = give(llm, right)
        drafter.answers[tuple(prompt)] = answer.tokens
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
        off = llm.generate(prompt, speculative="off", **options)
        short = llm.generate(prompt, draft_max=1, **options)
        on = llm.generate(prompt, **options)
        assert off.tokens == short.tokens == on.tokens == answer.tokens
        assert [off.timings.n_steps, short.timings.n_steps, on.timings.n_steps] == [16, 9, 3]
        assert on.timings.tokens_per_step == pytest.approx(16 / 3)
        assert not off.timings.drafts
        assert on.timings.drafts["lookup"].accepted == 13
