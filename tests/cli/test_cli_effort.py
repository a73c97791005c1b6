"""--n-expert-used, --n-layer-exit and --split-experts through the commands, on the bundled mixture of experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import Result

from motley import LLM
from motley.bundled import bundled_experts_path, bundled_model_path
from motley.quality import Score, read_chunks, second_half_nll

Motley = Callable[..., Result]
TEXT = "Once upon a time there was a little owl who lived in an old tree near the river. " * 3
PROMPT = ("-p", "Once upon a time", "-n", "8", "--temp", "0", "-no-cnv", "--no-display-prompt")
EFFORTS = [{}, {"n_expert_used": 1}, {"n_expert_used": 16}, {"n_layer_exit": 2}]
MODEL = str(bundled_experts_path())


def flags(effort: dict[str, int]) -> list[str]:
    return [word for name, n in effort.items() for word in (f"--{name.replace('_', '-')}", str(n))]


def run(motley: Motley, *args: str) -> str:
    result = motley(*args)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_run_answers_as_the_library_does_with_each_effort(motley: Motley) -> None:
    answers = []
    for effort in EFFORTS:
        with LLM(MODEL, n_ctx=64) as llm:
            sampling: dict[str, Any] = {"max_tokens": 8, "temperature": 0, **effort}
            expected = llm.generate("Once upon a time", **sampling).text
        answers.append(run(motley, "run", MODEL, "-c", "64", *PROMPT, *flags(effort)).strip())
        assert answers[-1] == expected.strip()
    assert len(set(answers)) > 2  # the flags change something


def test_perplexity_is_that_of_the_effort(motley: Motley) -> None:
    found = []
    for effort in EFFORTS:
        with LLM(MODEL, n_ctx=32) as llm:
            (chunk,) = read_chunks(llm.tokenizer, TEXT, 32, 1)
            score = Score() + second_half_nll(llm.logits(chunk, **effort), chunk)  # type: ignore[arg-type]
        args = ("perplexity", MODEL, "-p", TEXT, "-c", "32", "--chunks", "1", "--json", *flags(effort))
        found.append(json.loads(run(motley, *args))["perplexity"])
        assert found[-1] == pytest.approx(score.perplexity, rel=1e-6)
    assert len(set(found)) == len(EFFORTS)


@pytest.mark.slow
def test_bench_counts_the_bytes_of_the_effort(motley: Motley) -> None:
    for effort in EFFORTS:
        args = ("bench", MODEL, "-p", "0", "-n", "2", "-r", "1", "--json", *flags(effort))
        (row,) = json.loads(run(motley, *args))["rows"]
        with LLM(MODEL, n_ctx=32) as llm:
            assert row["bytes_per_token"] == llm.token_bytes(1, **effort)  # type: ignore[arg-type]
        assert row["tokens_per_second"] > 0


CREW = ("--device", "cpu,cpu", "-sm", "tensor", "-ts", "1,1", "--split-experts")


@pytest.mark.parametrize("way", ["ffn", "whole"])
def test_experts_are_split_as_asked_in_every_command(motley: Motley, way: str) -> None:
    alone = run(motley, "run", MODEL, "-c", "64", *PROMPT, "--backend", "reference")
    assert run(motley, "run", MODEL, "-c", "64", *PROMPT, "--backend", "reference", *CREW, way) == alone
    args = ("perplexity", MODEL, "-p", TEXT, "-c", "32", "--chunks", "1", "--json")
    one, two = (json.loads(run(motley, *args, *more))["perplexity"] for more in ((), (*CREW, way)))
    assert two == pytest.approx(
        one, rel=0.02
    )  # activations are rounded to 8 bits, and parts round differently
    run(motley, "bench", MODEL, "-p", "2", "-n", "2", "-r", "1", "--json", *CREW, way)
    explained = json.loads(run(motley, "explain", MODEL, "--json", *CREW, way))
    assert explained["split_experts"] == way


@pytest.mark.parametrize("command", ["run", "perplexity", "bench"])
@pytest.mark.parametrize(
    ("model", "wrong", "error", "hint"),
    [
        (
            MODEL,
            ("--n-expert-used", "0"),
            "--n-expert-used 0 is not possible",
            "--n-expert-used must be an integer from 1 to 16",
        ),
        (MODEL, ("--n-expert-used", "17"), "--n-expert-used 17 is not possible", "from 1 to 16"),
        (MODEL, ("--n-layer-exit", "7"), "--n-layer-exit 7 is not possible", "from 1 to 6"),
        (MODEL, ("--n-layer-exit", "0"), "--n-layer-exit 0 is not possible", "from 1 to 6"),
        (MODEL, ("--n-layer-exit", "2.5"), "--n-layer-exit '2.5' is not a whole number", "--help"),
        (MODEL, ("--split-experts", "rows"), "unknown way to split experts 'rows'", "auto, ffn, whole"),
        (str(bundled_model_path()), ("--n-expert-used", "2"), "the model has no experts", "leave out"),
    ],
)
def test_impossible_numbers_are_refused_with_the_range(
    motley: Motley, command: str, model: str, wrong: tuple[str, str], error: str, hint: str
) -> None:
    text = {"run": PROMPT, "perplexity": ("-p", TEXT, "-c", "32"), "bench": ("-n", "1", "-p", "0")}[command]
    result = motley(command, model, *text, *wrong)
    assert result.exit_code == 2
    said = [line for line in result.stderr.splitlines() if line.startswith(("error: ", "hint: "))]
    assert error in said[0]
    assert hint in said[1]
    assert "loaded" not in result.stderr
