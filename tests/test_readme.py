"""What the README says can be typed: commands, Python, make targets."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from motley import LLM
from motley.bundled import bundled_model_path
from motley.cli import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands(program: str) -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line[:1] == [program]]


def in_reach(words: list[str], folder: Path) -> list[str]:
    """The command on files that exist, and short."""
    (folder / "text.txt").write_text("It was a bright cold day in April. " * 8, encoding="utf-8")
    stand_ins = {"model.gguf": str(bundled_model_path()), "text.txt": str(folder / "text.txt")}
    stand_ins["split.svg"] = str(folder / "split.svg")
    words = [stand_ins.get(word, word) for word in words]
    if "-n" in words:
        words[words.index("-n") + 1] = "3"
    short = {
        "perplexity": ["-c", "16"],
        "kv-quality": ["-c", "32", "--chunks", "1", "--no-recall"],
        "effort-quality": ["-c", "32", "--chunks", "1"],
    }
    return [*words, *short.get(words[0], [])]


@pytest.mark.parametrize("words", commands("motley"), ids=" ".join)
def test_commands_run(words: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, in_reach(words, tmp_path), input="/quit\n")
    assert result.exit_code == 0, result.output
    if "split.svg" in words:
        assert (tmp_path / "split.svg").exists()


@pytest.mark.parametrize("target", [words[0] for words in commands("make")])
def test_make_targets_exist_and_call_motley_s_own_tools(target: str) -> None:
    result = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = {"demo": "/motley run", "test": "-m pytest"}[target]
    assert expected in result.stdout


def test_the_demo_s_command_runs(tmp_path: Path) -> None:
    printed = subprocess.run(
        ["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    (line,) = [line for line in printed.splitlines() if "/motley run" in line]
    result = CliRunner().invoke(app, in_reach(shlex.split(line)[1:], tmp_path))
    assert result.exit_code == 0, result.output


def test_the_first_snippet_runs_as_it_stands(tmp_path: Path) -> None:
    """In a new process and an empty folder."""
    command = [sys.executable, "-c", blocks("python")[0]]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert "top_p" in result.stdout.splitlines()[-1]  # the error at its end
    assert list(tmp_path.iterdir()) == []


def test_python_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All Python blocks in order, as one program, with answers cut short."""
    monkeypatch.chdir(tmp_path)  # a session is written
    program = "\n".join(blocks("python"))
    program = re.sub(r"max_tokens=\d+", "max_tokens=3", program)
    program = program.replace('"model.gguf"', repr(str(bundled_model_path())))
    exec(compile(program, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_python_of_the_page_on_the_library_runs() -> None:
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    with LLM(n_ctx=512) as llm:
        exec(compile(program, "library.md", "exec"), {"llm": llm, "LLM": LLM})
