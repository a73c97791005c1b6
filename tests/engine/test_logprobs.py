"""Log-probabilities of answers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from motley import LLM
from motley.errors import RequestError

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm(bundled: Path) -> LLM:
    return LLM(bundled, n_ctx=256, n_parallel=4, backend="reference", cache_type_k="f32", cache_type_v="f32")


def log_softmax(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.float64)
    shifted: np.ndarray = row - row.max()
    return shifted - math.log(np.exp(shifted).sum())


def expected(llm: LLM, tokens: tuple[int, ...]) -> np.ndarray:
    prompt = llm.tokenizer.encode(PROMPT)
    rows = llm.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
    return np.stack([log_softmax(row) for row in rows])


def test_logprobs_are_those_of_the_models_own_distribution(llm: LLM) -> None:
    """Whatever temperature, penalties, bias and masks do to the choice."""
    answer = llm.generate(
        PROMPT, max_tokens=8, seed=3, logprobs=5, temperature=1.7, repeat_penalty=1.3,
        logit_bias={100: 5.0}, regex=r"(.|\n)*",
    )  # fmt: skip
    assert answer.logprobs is not None
    rows = expected(llm, answer.tokens)
    assert [entry.token for entry in answer.logprobs] == list(answer.tokens)
    for entry, row in zip(answer.logprobs, rows, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token], abs=1e-4)
        assert [token for token, _ in entry.top] == list((-row).argsort(kind="stable")[:5])
        assert [value for _, value in entry.top] == pytest.approx(sorted(row, reverse=True)[:5], abs=1e-4)


def test_no_logprobs_unless_asked_for_and_none_of_the_likeliest_with_0(llm: LLM) -> None:
    assert llm.generate(PROMPT, max_tokens=2).logprobs is None
    answer = llm.generate(PROMPT, max_tokens=2, logprobs=0)
    assert answer.logprobs is not None
    assert [entry.top for entry in answer.logprobs] == [(), ()]


def test_logprobs_do_not_change_the_answer(llm: LLM) -> None:
    plain = llm.generate(PROMPT, max_tokens=4, seed=1)
    assert llm.generate(PROMPT, max_tokens=4, seed=1, logprobs=20).tokens == plain.tokens
    assert (
        llm.generate(PROMPT, max_tokens=4, seed=1, logprobs=3, post_sampling_probs=True).tokens
        == plain.tokens
    )


def test_an_end_token_has_no_entry(llm: LLM) -> None:
    answer = llm.generate(
        PROMPT, max_tokens=10, logprobs=1, logit_bias=dict.fromkeys(llm.tokenizer.eog_ids, 99.0)
    )
    assert answer.finish_reason == "stop"
    assert answer.logprobs == ()


def test_probabilities_after_sampling(llm: LLM) -> None:
    answer = llm.generate(
        PROMPT, max_tokens=6, seed=2, logprobs=20, post_sampling_probs=True, top_k=4, min_p=0, top_p=1
    )
    assert answer.logprobs is not None
    rows = expected(llm, answer.tokens)
    for entry, row in zip(answer.logprobs, rows, strict=True):
        kept = (-row).argsort(kind="stable")[:4]
        wanted = log_softmax(row[kept] / 0.8)
        assert [token for token, _ in entry.top] == list(kept)
        assert [value for _, value in entry.top] == pytest.approx(list(wanted), abs=1e-3)
        assert entry.logprob == dict(entry.top)[entry.token]


def test_greedy_sampling_is_certain(llm: LLM) -> None:
    answer = llm.generate(PROMPT, max_tokens=3, temperature=0, logprobs=3, post_sampling_probs=True)
    assert answer.logprobs is not None
    assert [entry.top for entry in answer.logprobs] == [((entry.token, 0.0),) for entry in answer.logprobs]


def test_streams_show_logprobs_as_they_come(llm: LLM) -> None:
    stream = llm.stream(PROMPT, max_tokens=6, seed=1, logprobs=2)
    seen = [len(stream.logprobs) for _ in stream]
    assert seen == sorted(seen)
    assert seen[-1] == 6
    assert stream.logprobs == stream.completion.logprobs
    assert llm.stream(PROMPT, max_tokens=1).logprobs == ()


@pytest.mark.parametrize("wrong", [-1, 1001, 1.5, True, "5"])
def test_what_is_no_number_of_logprobs(llm: LLM, wrong: object) -> None:
    with pytest.raises(RequestError, match="logprobs"):
        llm.generate(PROMPT, logprobs=wrong)
