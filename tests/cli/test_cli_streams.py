"""What standard input and output can be like: full, closed, of another encoding. Each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")  # a disk without room


def run(shell: str, *, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[str]:
    """`motley` followed by what a shell makes of `shell`."""
    result = subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m motley {shell}"],
        input=stdin,
        capture_output=True,
        env=os.environ | environment,
        timeout=300,
        check=False,
    )
    return subprocess.CompletedProcess("", result.returncode, result.stdout.decode(), result.stderr.decode())


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["tokenize -p Hi", "inspect", "run -p Hi -n 2"])
def test_a_full_disk_is_one_line_and_a_hint(command: str) -> None:
    result = run(f"{command} > {FULL}")
    assert result.returncode == 2
    *_, error, hint = result.stderr.splitlines()
    assert error == "error: standard output: No space left on device"
    assert hint == "hint: is there room on the disk?"
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["--help", "devices"])
def test_a_terminal_of_unknown_width_is_one_of_80_columns(command: str) -> None:
    unknown, usual = (run(command, COLUMNS=width).stdout for width in ("0", "80"))
    assert len(unknown) > 100
    assert [line.split()[:1] for line in unknown.splitlines()] == [
        line.split()[:1] for line in usual.splitlines()
    ]


def test_a_closed_stream_is_an_empty_one() -> None:
    assert run("run <&-").returncode == 0
    assert run("tokenize -p Hi >&-").returncode == 0


def test_bytes_that_are_no_text_are_refused() -> None:
    for command in ("tokenize", "run"):
        result = run(command, stdin=b"caf\xe9", PYTHONIOENCODING="utf-8:strict")
        assert result.returncode == 2
        assert "error: the text is not valid Unicode" in result.stderr
        assert "Traceback" not in result.stderr


def test_a_terminal_that_knows_only_ascii_gets_the_rest_spelled_out() -> None:
    result = run("inspect", PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert "4,096 \\xd7 string" in result.stdout
