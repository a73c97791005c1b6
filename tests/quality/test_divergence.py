"""Divergence against its formula, term by term."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from motley.quality import compare
from motley.quality.divergence import RowDivergence

seeds = st.integers(0, 2**32 - 1)


def random_logits(seed: int, n_rows: int, n_vocab: int = 11) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(n_rows, n_vocab), scale=4).astype(np.float32)


def naive_kl(reference: NDArray[np.float32], logits: NDArray[np.float32]) -> float:
    """Of one row."""
    expected, got = ([math.exp(float(x)) for x in row] for row in (reference, logits))
    p, q = ([x / sum(weights) for x in weights] for weights in (expected, got))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@given(seeds, st.integers(1, 130))  # more rows than are computed at once
def test_figures_are_those_of_the_formula(seed: int, n_rows: int) -> None:
    reference, logits = random_logits(seed, n_rows), random_logits(seed + 1, n_rows)
    kl = [naive_kl(a, b) for a, b in zip(reference, logits, strict=True)]
    result = compare(reference, logits)
    assert result.kl_mean == pytest.approx(sum(kl) / n_rows)
    assert result.kl_median == pytest.approx(np.median(kl))
    assert result.kl_max == pytest.approx(max(kl))
    assert result.kl_p99 == pytest.approx(np.percentile(kl, 99))
    same = [int(a.argmax()) == int(b.argmax()) for a, b in zip(reference, logits, strict=True)]
    assert result.same_top == pytest.approx(sum(same) / n_rows)


@given(seeds, st.floats(-500, 500))
def test_a_shift_of_all_logits_changes_no_prediction(seed: int, shift: float) -> None:
    logits = random_logits(seed, 5)
    result = compare(logits, (logits.astype(np.float64) + shift).astype(np.float32))
    assert result.kl_max < 1e-8
    assert compare(logits, logits).kl_max == 0.0
    assert compare(logits, logits).same_top == 1.0


def test_it_is_never_negative_and_sees_differences_below_float32() -> None:
    logits = random_logits(3, 1000)
    nudged = logits + np.float32(1e-5) * np.sign(random_logits(4, 1000))
    rows = RowDivergence.between(logits, nudged)
    assert rows.kl.min() >= 0.0
    assert 1e-12 < rows.kl.mean() < 1e-9


def test_huge_logits_stay_finite() -> None:
    reference = np.array([[1e30, 0.0, -1e30]], dtype=np.float32)
    assert compare(reference, reference).kl_mean == 0.0
    assert math.isfinite(compare(reference, reference[:, ::-1]).kl_mean)


@given(seeds, st.integers(1, 40), st.integers(1, 40))
def test_parts_of_a_text_join_to_the_whole(seed: int, first: int, second: int) -> None:
    n = first + second
    reference, logits = random_logits(seed, n), random_logits(seed + 1, n)
    parts = [
        RowDivergence.between(reference[part], logits[part]) for part in (slice(first), slice(first, None))
    ]
    assert RowDivergence.join(parts).summary() == compare(reference, logits)


def test_arrays_of_different_shape_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="against a reference of"):
        compare(random_logits(0, 3), random_logits(0, 2))
