"""The commands with a real model; twice as a process of its own, as a user runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Motley = Callable[..., Result]
SENTENCE = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "


def run_process(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from motley.cli import main; main()", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def model(bundled: Path) -> str:
    return str(bundled)


def test_a_process_streams_a_story_and_shows_the_figures(model: str) -> None:
    result = run_process("run", model, "-p", "Once upon a time", "-n", "16", "--temp", "0")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Once upon a time there was a ")
    assert re.search(r"^16 tokens, \d+\.\d tokens/s$", result.stderr, re.MULTILINE)
    assert re.search(r"^loaded \d+\.\d MiB in \d+\.\d\d s$", result.stderr, re.MULTILINE)


def test_a_process_makes_random_weights_and_measures_them(tmp_path: Path) -> None:
    """In a process of its own, which imports only parts of torch."""
    command = [
        sys.executable,
        "-m",
        "motley",
        "bench",
        "--shape",
        "llama-15m",
        "--layers",
        "1",
        "--device",
        "cpu",
    ]
    result = subprocess.run(
        [*command, "-p", "8", "-n", "4", "-r", "1"],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"pp8 +\d+\.\d", result.stdout)
    assert list(tmp_path.rglob("*.gguf"))


def test_speculation_shows_tokens_a_step_and_leaves_the_text(
    motley: Motley, model: str, bundled: Path
) -> None:
    flags = ("run", model, "-no-cnv", "-p", SENTENCE * 3, "-n", "24", "--temp", "0")
    plain = motley(*flags)
    draft = str(bundled.with_name("motley-draft-1m-q8_0.gguf"))
    drafted = motley(*flags, "--spec", "lookup,draft", "-md", draft, "--draft-n", "7")
    assert plain.exit_code == drafted.exit_code == 0, drafted.stderr
    assert plain.stdout == drafted.stdout
    assert "a step" not in plain.stderr
    assert re.search(
        r"^24 tokens, .*tokens/s, \d\.\d\d tokens a step \(.* of \d+ right", drafted.stderr, re.MULTILINE
    )


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--spec", "mtp"), "no multi-token prediction layer"),
        (("--spec", "draft"), "there is no draft model"),
        (("--draft-max", "64"), "--draft-max is 64"),
        (("-md", "missing.gguf"), "missing.gguf"),
    ],
)
def test_speculation_that_is_not_possible_is_refused(
    motley: Motley, model: str, flags: tuple[str, ...], error: str
) -> None:
    result = motley("run", model, "-p", "x", "-n", "1", *flags)
    assert result.exit_code == 2
    assert error in result.stderr


def test_a_process_that_fails_exits_with_2_and_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("not a model")
    result = run_process("run", str(path), "-p", "x")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert "notes.gguf" in result.stderr
    assert "Traceback" not in result.stderr


def test_verbose_says_which_kernels_and_patterns_were_chosen(
    motley: Motley, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTLEY_READ_PATTERN", "2,512,40")
    result = motley("run", model, "-p", "Once", "-n", "1", "--backend", "cpu", "--threads", "1", "--verbose")
    assert result.exit_code == 0, result.output
    assert re.search(r"cpu: 1 threads with \w+ kernels", result.stderr)
    assert "MOTLEY_READ_PATTERN: 2 streams" in result.stderr
    quiet = motley("run", model, "-p", "Once", "-n", "1", "--backend", "cpu", "--threads", "1")
    assert "kernels" not in quiet.stderr


def test_a_seed_repeats_the_answer(motley: Motley, model: str) -> None:
    args = ("run", model, "-p", "Once", "-n", "8", "--json")
    first, second = (json.loads(motley(*args, "-s", "5").stdout) for _ in range(2))
    assert first["tokens"] == second["tokens"]
    assert len(first["tokens"]) == first["timings"]["new_tokens"] == 8
    assert first["finish_reason"] == "length"
    assert first["load_seconds"] > 0


def test_a_reverse_prompt_ends_the_answer(motley: Motley, model: str) -> None:
    result = motley("run", model, "-p", "Once upon a time", "--temp", "0", "-r", "named", "--json")
    answer = json.loads(result.stdout)
    assert re.fullmatch(r"Once upon a time there was a (\w+ )+", answer["text"])
    assert answer["finish_reason"] == "stop"


def test_lines_from_a_pipe_are_continued_one_by_one(motley: Motley, model: str) -> None:
    result = motley("run", model, "-n", "4", "--temp", "0", stdin="Once upon a\n/help\nThere was\n")
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 2


def test_a_prompt_longer_than_the_context_is_an_error(motley: Motley, model: str) -> None:
    result = motley("run", model, "-p", SENTENCE * 2, "-c", "32")
    assert result.exit_code == 2
    assert "the context holds 32" in result.stderr


def test_english_is_predicted_better_than_reversed_english(motley: Motley, model: str) -> None:
    def perplexity(text: str) -> float:
        result = motley("perplexity", model, "-p", text, "-c", "32", "--json")
        assert result.exit_code == 0, result.stderr
        return float(json.loads(result.stdout)["perplexity"])

    assert 1 < perplexity(SENTENCE * 3) < perplexity(SENTENCE[::-1] * 3) / 4


def test_a_text_is_tokenized_without_loading_the_model(motley: Motley, model: str) -> None:
    result = motley("tokenize", model, "-p", "Once upon a time", "--ids")
    assert result.stdout == "[0, 787, 2706, 2569, 2645]\n"


def test_a_cache_that_cannot_be_rotated_is_noted(motley: Motley, random_narrow: Path) -> None:
    args = ("run", str(random_narrow), "-p", "Once upon a time", "-n", "1", "-ctk", "q4_0")
    assert "note: the q4_0 KV cache is not rotated: a head's 24 dims" in motley(*args).stderr
    assert "note:" not in motley(*args, "--no-kv-rotation").stderr
