"""Experts and layers, one effort after the other, on the bundled mixture of experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from motley import LLM
from motley.bundled import bundled_experts_path
from motley.errors import ConfigError
from motley.gguf import read_spec
from motley.models import DecoderParams, read_params
from motley.quality import (
    EffortChoice,
    EffortReport,
    Evaluation,
    choose_efforts,
    compare,
    full_effort,
    measure_efforts,
)
from motley.text import Tokenizer

N_CTX = 32
TEXT = "Once upon a time there was a little owl. It lived in an old tree and liked to sing. " * 4


@pytest.fixture(scope="module")
def params() -> DecoderParams:
    return read_params(read_spec(bundled_experts_path()))


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    tokenizer = Tokenizer.from_spec(read_spec(bundled_experts_path()))
    return Evaluation.of(tokenizer, TEXT, n_ctx=N_CTX, max_chunks=2)


@pytest.fixture(scope="module")
def steps() -> list[str]:
    return []


@pytest.fixture(scope="module")
def report(evaluation: Evaluation, params: DecoderParams, steps: list[str]) -> EffortReport:
    choices = choose_efforts(params, [4, 2, 8], [3])
    return measure_efforts(
        bundled_experts_path(), evaluation, full_effort(params), choices, advance=steps.append
    )


def test_each_number_is_measured_once_and_each_step_is_reported(
    report: EffortReport, evaluation: Evaluation, steps: list[str]
) -> None:
    full = EffortChoice(4, 6)
    others = [EffortChoice(2, 6), EffortChoice(8, 6), EffortChoice(4, 3)]
    assert [row.choice for row in (report.full, *report.efforts)] == [full, *others]
    names = [choice.describe() for choice in (full, *others)]
    assert steps == [name for name in names for _ in evaluation.chunks] + names
    assert report.n_scored == 2 * (N_CTX // 2 - 1)


def test_the_full_model_has_no_error(report: EffortReport) -> None:
    assert (report.full.divergence.kl_max, report.full.divergence.same_top) == (0.0, 1.0)
    assert report.full.perplexity_change == 0.0


def test_figures_are_those_of_single_runs(report: EffortReport, evaluation: Evaluation) -> None:
    with LLM(bundled_experts_path(), n_ctx=N_CTX) as llm:

        def second_halves(**effort: int) -> Any:
            return np.concatenate(
                [llm.logits(chunk, **effort)[N_CTX // 2 : -1] for chunk in evaluation.chunks]  # type: ignore[arg-type]
            )

        full = second_halves()
        for row, effort in zip(
            report.efforts, ({"n_expert_used": 2}, {"n_expert_used": 8}, {"n_layer_exit": 3}), strict=True
        ):
            assert row.divergence.kl_mean > 0
            assert row.divergence == compare(full, second_halves(**effort))
            assert row.bytes_per_token == llm.token_bytes(N_CTX // 2, **effort)  # type: ignore[arg-type]
            assert row.perplexity_change == pytest.approx(row.perplexity / report.full.perplexity - 1)
            assert row.tokens_per_second > 0


def test_fewer_experts_and_fewer_layers_read_fewer_bytes(report: EffortReport) -> None:
    two, eight, three_layers = (row.bytes_per_token for row in report.efforts)
    assert two < report.full.bytes_per_token < eight
    assert three_layers < report.full.bytes_per_token


def test_by_default_powers_of_two_and_eighths_are_measured(params: DecoderParams) -> None:
    assert choose_efforts(params) == [EffortChoice(k, 6) for k in (1, 2, 8)] + [
        EffortChoice(4, n) for n in (1, 2, 3, 4, 5)
    ]
    dense = cast(DecoderParams, SimpleNamespace(experts=None, n_layers=32))
    assert choose_efforts(dense) == [EffortChoice(0, n) for n in range(4, 32, 4)]


def test_a_grid_has_every_pair(params: DecoderParams) -> None:
    grid = choose_efforts(params, [2, 4], [3, 5], is_grid=True)
    assert set(grid) == {EffortChoice(k, n) for k in (2, 4) for n in (3, 5, 6)} - {EffortChoice(4, 6)}


@pytest.mark.parametrize(
    ("experts", "layers", "message", "hint"),
    [
        ([0], None, "--experts 0 is not possible", "from 1 to 16"),
        ([17], None, "--experts 17 is not possible", "from 1 to 16"),
        (None, [7], "--layers 7 is not possible", "from 1 to 6"),
        ([4], [6], "the full model has 4 experts, 6 layers", "other numbers"),
    ],
)
def test_impossible_numbers_are_refused_with_the_range(
    params: DecoderParams, experts: list[int] | None, layers: list[int] | None, message: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_efforts(params, experts, layers)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")


def test_a_dense_model_has_no_experts_to_choose() -> None:
    dense = cast(DecoderParams, SimpleNamespace(experts=None, n_layers=4))
    with pytest.raises(ConfigError, match="no experts"):
        choose_efforts(dense, [2])
