"""Drafts beside constraints, log-probabilities and samplers with a state: nothing of an answer changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from by_hand import stepped_by_hand
from drafters import Guess, bushy, give, half, right, scattered, serve, too_long, wrong

from motley import LLM
from motley.bundled import bundled_draft_path, bundled_experts_path
from motley.engine import SamplingParams
from motley.engine.drafting import Draft, Forced
from motley.engine.drafting.control import FixedControl
from motley.engine.drafting.draft import DraftRequest

PROMPT = list(range(3, 40))
OPTIONS: list[dict[str, Any]] = [
    {
        "json_schema": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "maxItems": 5,
        }
    },
    {"regex": "([a-z]{2,6} ){3}end"},
    {"grammar": 'start: "the " /[a-z]{2,9}/ "."', "grammar_triggers": ("the ",)},
    {"min_tokens": 12, "logit_bias": {}},
    {"mirostat": 2},
    {"dry_multiplier": 0.8},
    {"xtc_probability": 0.5},
    {"logprobs": 3},
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Q8_0: its logits do not depend on the number of rows, to the bit."""
    with LLM(bundled_draft_path(), n_ctx=160, n_batch=64, n_parallel=8, kv_block_size=16) as llm:
        yield llm


@pytest.mark.parametrize("guess", [right, wrong, half, too_long, scattered, bushy])
def test_drafts_do_not_change_answers(llm: LLM, guess: Guess) -> None:
    engine = llm._loaded.engine
    params = [SamplingParams(seed=i, max_tokens=24, **options) for i, options in enumerate(OPTIONS)]
    ends = dict.fromkeys(llm.tokenizer.eog_ids, 9.0)
    params[3] = SamplingParams(seed=3, max_tokens=24, min_tokens=12, logit_bias=ends)
    prompts = [[*PROMPT, 50 + i] for i in range(len(params))]
    give(llm, right)  # knows no answers, so it has no drafts
    plain = serve(engine, prompts, params)
    drafter = give(llm, guess)
    for prompt, request in zip(prompts, plain, strict=True):
        drafter.answers[tuple(prompt)] = tuple(request.generated)
    drafted = serve(engine, prompts, params)
    for one, other in zip(plain, drafted, strict=True):
        assert other.generated == one.generated
        assert other.finish_reason == one.finish_reason
        assert other.text.all == one.text.all
    n_drafts = sum(count.drafts for request in drafted for count in request.drafts.values())
    assert n_drafts == len(drafter.n_accepted)
    assert plain[-1].logprobs is not None
    assert [entry.token for entry in drafted[-1].logprobs or ()] == drafted[-1].generated
    for a, b in zip(plain[-1].logprobs, drafted[-1].logprobs or (), strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
    if guess is right:
        assert max(drafter.n_accepted) > 1


def test_what_a_grammar_forces_is_drafted_and_the_text_stays() -> None:
    options: dict[str, Any] = {
        "regex": "The answer, as all of us know, is (yes|no), without any doubt[.]",
        "seed": 1,
    }
    with LLM(bundled_draft_path(), n_ctx=160) as llm:
        llm._loaded.engine.speculator._control = FixedControl()  # all drafts are computed
        plain = llm.generate(PROMPT, speculative="off", **options)
        drafted = llm.generate(PROMPT, speculative="grammar", **options)
        assert drafted.tokens == plain.tokens
        assert drafted.timings.drafts["grammar"].accepted > 0
        assert drafted.timings.n_steps < plain.timings.n_steps
        request = llm._loaded.engine.new_request(PROMPT, SamplingParams(speculative="auto", **options))
        (draft,) = Forced().draft([DraftRequest(request, 4)])
        assert len(draft.tokens) == 4
        free = llm._loaded.engine.new_request(PROMPT, SamplingParams())
        assert Forced().draft([DraftRequest(free, 4)]) == [Draft((), "grammar")]


def test_forced_tokens_are_those_of_the_only_text(llm: LLM) -> None:
    request = llm._loaded.engine.new_request(PROMPT, SamplingParams(regex="The answer is (yes|no)"))
    assert request.matcher is not None
    tokens = request.matcher.forced()
    assert "The answer is".startswith(llm.tokenizer.decode(tokens))
    assert len(tokens) > 1
    assert request.matcher.forced() == tokens  # asking changes nothing
    for token in tokens:
        request.matcher.accept(token)
    lazy = SamplingParams(grammar='start: "the " "cat"', grammar_triggers=("the ",))
    free = llm._loaded.engine.new_request(PROMPT, lazy)
    assert free.matcher is not None
    assert free.matcher.forced() == []


@pytest.mark.parametrize("guess", [right, half, scattered])
def test_requests_with_other_experts_and_layers_have_drafts_beside_each_other(guess: Guess) -> None:
    params = [
        SamplingParams(seed=i, max_tokens=18, ignore_eos=True, **effort)
        for i, effort in enumerate(
            ({}, {"n_expert_used": 1}, {"n_expert_used": 3}, {"n_layer_exit": 3}, {"n_layer_exit": 3}, {})
        )
    ]
    prompts = [[*PROMPT, 50 + i] for i in range(len(params))]
    with LLM(bundled_experts_path(), n_ctx=96, n_batch=64, n_parallel=6, kv_block_size=8) as llm:
        engine = llm._loaded.engine
        with stepped_by_hand(llm):
            give(llm, right)
            plain = serve(engine, prompts, params)
            drafter = give(llm, guess)
            drafter.answers |= {tuple(p): tuple(r.generated) for p, r in zip(prompts, plain, strict=True)}
            drafted = serve(engine, prompts, params)
    assert [r.generated for r in drafted] == [r.generated for r in plain]
    assert max(drafter.n_accepted) > 2
