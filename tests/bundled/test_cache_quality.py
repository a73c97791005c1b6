"""What quantized caches cost the bundled models, on text that they were not trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
from training.evaluate import FRESH_SEED, held_out_stories

from motley.bundled import bundled_model_path, measuring_model_path
from motley.gguf import read_spec
from motley.quality import CacheChoice, Evaluation, Report, measure_types
from motley.text import Tokenizer

pytestmark = pytest.mark.slow

HELD_OUT = 80_000  # characters at the end of War and Peace: within the 5 % that training never sees
Q8_0, Q4_0 = (CacheChoice(kind, kind, is_rotated=True) for kind in ("q8_0", "q4_0"))


@pytest.fixture(scope="module")
def report(shared: Path) -> Report:
    """On books, with the model that was trained on them."""
    book = (shared / "data" / "corpora" / "war-and-peace.txt").read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_spec(read_spec(measuring_model_path()))
    evaluation = Evaluation.of(tokenizer, book[-HELD_OUT:], n_ctx=2048, max_chunks=2, n_needles=2)
    return measure_types(measuring_model_path(), evaluation, [Q8_0, Q4_0])


@pytest.fixture(scope="module")
def stories() -> Report:
    """The same on the kind of text that the model is made for."""
    tokenizer = Tokenizer.from_spec(read_spec(bundled_model_path()))
    text = held_out_stories(60, FRESH_SEED)
    evaluation = Evaluation.of(tokenizer, text, n_ctx=2048, max_chunks=4, n_needles=0)
    return measure_types(bundled_model_path(), evaluation, [Q8_0, Q4_0])


def test_on_stories_q8_0_changes_next_to_nothing(stories: Report) -> None:
    q8_0 = stories.types[0]
    assert abs(q8_0.perplexity_change) < 0.002
    assert q8_0.divergence.same_top > 0.98


def test_on_stories_q4_0_costs_less_than_a_hundredth_of_perplexity(stories: Report) -> None:
    assert stories.types[1].perplexity_change < 0.01


def test_q8_0_costs_less_than_a_thousandth_of_perplexity(report: Report) -> None:
    q8_0 = report.types[0]
    assert q8_0.choice == Q8_0
    assert q8_0.perplexity_change < 0.001
    assert q8_0.divergence.same_top > 0.98


def test_q4_0_rotated_costs_less_than_a_hundredth_of_perplexity(report: Report) -> None:
    q4_0 = report.types[1]
    assert q4_0.choice == Q4_0
    assert q4_0.perplexity_change < 0.01


def test_needles_in_contexts_of_two_thousand_tokens_are_found(report: Report) -> None:
    for row in (report.baseline, *report.types):
        assert row.recall is not None
        assert row.recall.share == 1.0, row.choice


def test_types_save_what_they_say(report: Report) -> None:
    f32, q8_0, q4_0 = (row.bytes_per_token_allocated for row in (report.baseline, *report.types))
    assert (f32 / q8_0, f32 / q4_0) == pytest.approx((32 / 8.5, 32 / 4.5))
