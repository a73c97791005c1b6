"""The commands as a user runs them: a process of their own and a real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. " * 8


def run_motley(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from motley.cli import main; main()", *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def stories(shared: Path) -> str:
    return str(shared / "data" / "models" / "stories260K" / "stories260K.gguf")


def test_run_streams_a_story_and_shows_the_figures(stories: str) -> None:
    result = run_motley("run", stories, "-no-cnv", "-p", "Once upon a time", "-n", "16", "--temp", "0")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(", there was a")
    assert "answer: 16 tokens" in result.stderr
    assert "memory: " in result.stderr


def test_run_json_repeats_with_a_seed(stories: str) -> None:
    args = ("run", stories, "-no-cnv", "-p", "Once", "-n", "8", "-s", "5", "--json")
    first, second = (json.loads(run_motley(*args).stdout) for _ in range(2))
    assert first["text"] == second["text"]
    assert first["finish_reason"] == "length"
    assert len(first["tokens"]) == first["timings"]["new_tokens"] == 8


def test_a_file_that_is_no_model_is_an_error_with_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("not a model")
    result = run_motley("run", str(path), "-p", "x")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "notes.gguf" in result.stderr
    assert "Traceback" not in result.stderr
