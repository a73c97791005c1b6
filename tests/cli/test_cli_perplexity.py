"""`motley perplexity`; tests/quality has the arithmetic."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from fake_llm import FakeLLM
from typer.testing import Result

Motley = Callable[..., Result]


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
