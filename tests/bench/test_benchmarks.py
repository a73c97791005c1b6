"""`python -m benchmarks`: what it lists can be started by that name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_every_benchmark_in_the_list_has_a_help() -> None:
    pytest.importorskip("triton")
    names = re.findall(r"^  (\w+) ", run("-m", "benchmarks").stdout, re.MULTILINE)
    assert {"cuda_model", "peers", "virtual_devices"} <= set(names)
    program = f"""
import sys
from benchmarks.__main__ import main
for name in {names}:
    sys.argv = ["benchmarks", name, "--help"]
    try:
        main()
    except SystemExit as stop:
        assert stop.code == 0, name
"""
    result = run("-c", program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("show this help message") == len(names)
