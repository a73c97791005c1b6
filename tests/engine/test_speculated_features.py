"""Drafts beside constraints, log-probabilities and samplers with a state: nothing of an answer changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from drafters import Guess, give, half, right, serve, too_long, wrong

from motley import LLM
from motley.bundled import bundled_draft_path
from motley.engine import SamplingParams

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


@pytest.mark.parametrize("guess", [right, wrong, half, too_long])
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
    assert plain[-1].logprobs is not None
    assert [entry.token for entry in drafted[-1].logprobs or ()] == drafted[-1].generated
    for a, b in zip(plain[-1].logprobs, drafted[-1].logprobs or (), strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
    if guess is right:
        assert max(drafter.n_accepted) > 1
