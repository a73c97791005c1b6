"""Which types are measured, and what is said of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from motley.errors import ConfigError
from motley.gguf import read_spec
from motley.models import DecoderParams, read_params
from motley.quality import CacheChoice, Verdict, applicable, parse_choices


@pytest.fixture(scope="module")
def params(random_llama: Path) -> DecoderParams:
    return read_params(read_spec(random_llama))


def test_quantized_types_are_measured_rotated_and_not() -> None:
    assert parse_choices("f16, Q8_0,q8_0/q4_0,f16") == [
        CacheChoice("f16", "f16"),
        CacheChoice("q8_0", "q8_0", is_rotated=True),
        CacheChoice("q8_0", "q8_0"),
        CacheChoice("q8_0", "q4_0", is_rotated=True),
        CacheChoice("q8_0", "q4_0"),
    ]
    assert parse_choices("bf16/q4_0", rotations=(True,)) == [CacheChoice("bf16", "q4_0", is_rotated=True)]
    assert [choice.name for choice in parse_choices("q8_0,f16/q4_0", rotations=(False,))] == [
        "q8_0",
        "f16/q4_0",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [("q9", "q9"), ("f16/q8_0/q4_0", "3 types"), (" , ", "no KV cache types"), ("/", "''")],
)
def test_what_names_no_type_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_choices(text)


def test_a_model_whose_heads_fit_no_rotation_has_each_type_once(params: DecoderParams) -> None:
    choices = parse_choices("q8_0,f16")
    assert applicable(choices, params) == choices
    assert applicable(choices, replace(params, head_dim=80)) == parse_choices("q8_0,f16", rotations=(False,))


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ((0.0, 0.0), Verdict.AS_GOOD),
        ((0.0009, -0.2), Verdict.AS_GOOD),
        ((0.0011, 0.0), Verdict.SLIGHTLY_WORSE),
        ((0.0, 0.002), Verdict.SLIGHTLY_WORSE),
        ((0.0, 0.0, 0.96), Verdict.SLIGHTLY_WORSE),
        ((0.02, 0.0), Verdict.NOTICEABLY_WORSE),
        ((0.001, 0.02), Verdict.NOTICEABLY_WORSE),
        ((0.001, 0.0, 0.9), Verdict.NOTICEABLY_WORSE),
        ((0.2, 0.0), Verdict.BROKEN),
        ((0.0, 0.2), Verdict.BROKEN),
        ((0.0, 0.0, 0.0), Verdict.BROKEN),
        ((float("inf"), float("inf")), Verdict.BROKEN),
        ((float("nan"), float("nan")), Verdict.BROKEN),
    ],
)
def test_the_worst_figure_decides(figures: tuple[float, ...], verdict: Verdict) -> None:
    assert Verdict.of(*figures) is verdict
