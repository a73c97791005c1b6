"""`motley perplexity`: the arithmetic, and the command around it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from fake_llm import FakeLLM
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import Result

from motley.cli._perplexity import Score, second_half_nll, split_chunks
from motley.errors import RequestError

Motley = Callable[..., Result]


def test_chunks_do_not_overlap_begin_with_bos_and_drop_the_rest() -> None:
    tokens = list(range(100, 111))
    assert list(split_chunks(tokens, 4, None)) == [[100, 101, 102, 103], [104, 105, 106, 107]]
    assert list(split_chunks(tokens, 4, 1)) == [[1, 101, 102, 103], [1, 105, 106, 107]]
    assert list(split_chunks(tokens, 11, None)) == [tokens]


def test_a_text_shorter_than_one_context_is_an_error() -> None:
    with pytest.raises(RequestError, match="3 tokens, less than one context of 4"):
        list(split_chunks([1, 2, 3], 4, None))


@given(st.integers(4, 24), st.integers(0, 2**32 - 1))
def test_the_second_half_is_scored_against_the_next_token(n_tokens: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n_tokens, 7), scale=5).astype(np.float32)
    tokens = rng.integers(0, 7, n_tokens).tolist()
    expected = []
    for i in range(n_tokens // 2, n_tokens - 1):
        weights = np.exp(logits[i].astype(np.float64))
        expected.append(-math.log(weights[tokens[i + 1]] / weights.sum()))
    np.testing.assert_allclose(second_half_nll(logits, tokens), expected, rtol=1e-5, atol=1e-5)


def test_the_error_is_the_standard_error_of_the_mean_times_the_perplexity() -> None:
    nll = np.array([1.0, 2.0, 4.0, 0.5])
    score = Score() + nll[:2] + nll[2:]
    assert score.perplexity == pytest.approx(math.exp(nll.mean()))
    assert score.error == pytest.approx(math.exp(nll.mean()) * nll.std() / math.sqrt(3))


def test_a_uniform_guess_has_the_vocabulary_as_its_perplexity() -> None:
    logits = np.zeros((10, 50), dtype=np.float32)
    score = Score() + second_half_nll(logits, list(range(10)))
    assert score.perplexity == pytest.approx(50)
    assert score.error == pytest.approx(0, abs=1e-6)


def test_the_command_measures_a_text_in_chunks(motley: Motley, llm: FakeLLM, model: str) -> None:
    result = motley("perplexity", model, "-f", "-", "-c", "8", "--json", stdin="a" * 30)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {
        "model": "model.gguf",
        "perplexity": pytest.approx(2.0),  # `a` again, with probability 1/2
        "error": pytest.approx(0, abs=1e-6),
        "n_ctx": 8,
        "chunks": 3,
        "scored_tokens": 9,
    }
    assert llm.options.ctx_size == 8
    assert llm.prompts == [[1] + [1] * 7] * 3  # ord("a") % 32 == 1, the same as the fake's bos


def test_the_command_prints_the_figure_with_its_error(motley: Motley, llm: FakeLLM, model: str) -> None:
    result = motley("perplexity", model, "-p", "a" * 31, "-c", "8", "--chunks", "2")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "PPL = 2.0000 ± 0.0000",
        "model.gguf: 2 chunks of 8 tokens, 6 tokens scored",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no text to measure"),
        (("-p", "short"), "less than one context"),
        (("-p", "a" * 9, "-c", "2"), "nothing to score"),
    ],
)
def test_what_cannot_be_measured_is_an_error(
    motley: Motley, llm: FakeLLM, model: str, args: tuple[str, ...], message: str
) -> None:
    result = motley("perplexity", model, *args)
    assert result.exit_code == 2
    assert message in result.stderr
