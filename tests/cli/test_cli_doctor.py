"""`motley doctor`, and completion in a shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from typer.testing import Result

Motley = Callable[..., Result]


def test_the_report_names_what_is_there(motley: Motley) -> None:
    result = motley("doctor", "--json")
    assert result.exit_code == 0, result.output
    found = {each["subject"]: each for each in json.loads(result.stdout)}
    for subject in ("motley", "python", "torch", "native kernels", "bundled model", "cpu", "cache folder"):
        assert found[subject]["state"] == "ok"
    assert motley("doctor").stdout.count("\n") >= len(found)


def test_a_full_cache_folder_is_a_problem(motley: Motley, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=0))
    found = {each["subject"]: each for each in json.loads(motley("doctor", "--json").stdout)}
    assert found["cache folder"]["state"] == "problem"
    assert "XDG_CACHE_HOME" in found["cache folder"]["advice"]


def test_what_is_missing_comes_with_advice(motley: Motley, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.cli.doctor._EXTRAS", (("no_such_module", "hub", "does something"),))
    monkeypatch.setattr("motley.backends.cpu.native.core", None)
    result = motley("doctor")
    assert result.exit_code == 1  # without native kernels nothing is fast
    assert "pip install 'motley-llm[hub]'" in result.stdout
    assert "problem native kernels" in result.stdout


def test_a_gpu_that_torch_cannot_use_is_a_problem(motley: Motley, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.cli.doctor.shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    result = motley("doctor")
    assert result.exit_code == 1
    assert "there is a GPU, but this torch is for CPUs only" in result.stdout


def test_a_shell_completes_commands_and_flags() -> None:
    def completed(line: str) -> list[str]:
        words = line.split(" ")
        environment = {
            "_MOTLEY_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
            "_TYPER_COMPLETE_ARGS": line,
        }
        command = [sys.executable, "-m", "motley"]
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False, env=os.environ | environment
        )
        assert "Traceback" not in result.stderr, result.stderr
        return result.stdout.split()

    assert completed("motley per") == ["perplexity"]
    assert "--kv-cache-demand-paged" in completed("motley run --kv-cache")
