"""Cache types one after another, on a tiny model."""

from __future__ import annotations

import random
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from motley import LLM
from motley.bundled import RecallPrompt, bundled_model_path
from motley.bundled.recall import pseudo_word
from motley.gguf import read_spec
from motley.quality import (
    CacheChoice,
    Evaluation,
    Recall,
    Report,
    Verdict,
    compare,
    measure_recall,
    measure_types,
    parse_choices,
)
from motley.quality.sweep import ReferenceLogits
from motley.text import Tokenizer

N_CTX = 64


@pytest.fixture(scope="module")
def path(random_narrow: Path) -> Path:
    return random_narrow


@pytest.fixture(scope="module")
def text() -> str:
    return (bundled_model_path().parent / "MODEL_CARD.md").read_text(encoding="utf-8")[:2000]


@pytest.fixture(scope="module")
def evaluation(path: Path, text: str) -> Evaluation:
    return Evaluation.of(Tokenizer.from_spec(read_spec(path)), text, n_ctx=N_CTX, max_chunks=2)


@pytest.fixture(scope="module")
def steps() -> list[str]:
    return []


@pytest.fixture(scope="module")
def report(path: Path, evaluation: Evaluation, steps: list[str]) -> Report:
    choices = parse_choices("f32,f16,q8_0,q4_0/f16")
    return measure_types(path, evaluation, choices, advance=steps.append, backend="reference")


def test_all_sit_the_same_exam_and_each_step_is_reported(
    report: Report, evaluation: Evaluation, steps: list[str]
) -> None:
    assert [len(chunk) for chunk in evaluation.chunks] == [N_CTX] * 2
    assert (report.n_ctx, report.n_scored) == (N_CTX, 2 * (N_CTX // 2 - 1))
    assert steps == [name for name in ("f32", "f32", "f16", "q8_0", "q4_0/f16") for _ in evaluation.chunks]


def test_the_baseline_against_itself_has_no_error(report: Report) -> None:
    for row in (report.baseline, report.types[0]):
        assert row.choice == CacheChoice("f32", "f32")
        assert (row.divergence.kl_max, row.divergence.same_top, row.perplexity_change) == (0.0, 1.0, 0.0)
        assert row.verdict is Verdict.AS_GOOD


def test_fewer_bits_cost_more(report: Report) -> None:
    _, f16, q8_0, q4_0 = (row.divergence.kl_mean for row in report.types)
    assert 0 < f16 < q8_0 < q4_0
    assert report.types[1].verdict is Verdict.AS_GOOD


def test_figures_are_those_of_single_runs(report: Report, path: Path, evaluation: Evaluation) -> None:
    def second_halves(**types: str) -> Any:
        with LLM(path, n_ctx=N_CTX, backend="reference", **types) as llm:  # type: ignore[arg-type]
            return np.concatenate([llm.logits(chunk)[N_CTX // 2 : -1] for chunk in evaluation.chunks])

    baseline = second_halves(cache_type_k="f32", cache_type_v="f32")
    q4_0 = second_halves(cache_type_k="q4_0", cache_type_v="f16")
    row = report.types[-1]
    assert row.divergence == compare(baseline, q4_0)
    assert row.perplexity_change == pytest.approx(row.perplexity / report.baseline.perplexity - 1)


def test_a_change_is_known_better_than_the_perplexity_itself(report: Report) -> None:
    q8_0 = report.types[2]
    assert 0 < q8_0.perplexity_change_error < 0.1 * q8_0.perplexity_error / q8_0.perplexity


def test_bytes_are_counted_by_the_table_and_as_allocated(report: Report) -> None:
    n_values = 2 * 2 * 24  # layers, KV heads, dims
    q8_0 = report.types[2]
    assert q8_0.bytes_per_token == 2 * n_values * 34 / 32
    # A head of 24 dims fills a tile of 32.
    assert q8_0.bytes_per_token_allocated == q8_0.bytes_per_token * 32 / 24


def test_needles_stand_in_passages_that_fill_the_context() -> None:
    rng = random.Random(1)
    words = [pseudo_word(rng, held_out=False) for _ in range(4000)]
    text = " ".join(word + "." * (i % 9 == 0) for i, word in enumerate(words))
    tokenizer = SimpleNamespace(
        bos_id=None, adds_bos=False, encode=lambda s, **_: [len(w) for w in s.split()]
    )
    evaluation = Evaluation.of(cast(Tokenizer, tokenizer), text, n_ctx=256, max_chunks=1, n_needles=3)
    assert evaluation.n_steps == 4
    assert all(0 <= 256 - 32 - len(needle.tokens) < 8 for needle in evaluation.needles)


def test_recall_counts_the_answers_that_are_whole_words() -> None:
    replies = {1: " dalumb. The", 2: " dalumba", 3: "dalumb", 4: " it is dalumb"}
    asked: list[int] = []

    def generate(tokens: tuple[int, ...], **sampling: Any) -> Any:
        asked.append(sampling["max_tokens"])
        assert sampling["temperature"] == 0
        return SimpleNamespace(text=replies[tokens[0]])

    tokenizer = SimpleNamespace(encode=lambda text, add_special: list(text))
    prompts = [RecallPrompt("…", (i,), "dalumb", 1) for i in replies]
    recall = measure_recall(cast(LLM, SimpleNamespace(generate=generate, tokenizer=tokenizer)), prompts)
    assert recall == Recall(2, 4)
    assert recall.share == 0.5
    assert set(asked) == {len(" dalumb") + 2}


def test_the_reference_is_what_came_first() -> None:
    reference = ReferenceLogits(BytesIO())
    chunks = [np.arange(6, dtype=np.float32).reshape(2, 3) + i for i in range(3)]
    for i, chunk in enumerate(chunks):
        np.testing.assert_array_equal(reference.get(i, chunk), chunk)
    for i, chunk in enumerate(chunks):
        np.testing.assert_array_equal(reference.get(i, chunk * 2), chunk)
