"""Perplexity against its formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.errors import RequestError
from motley.quality.perplexity import Score, second_half_nll, split_chunks


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
