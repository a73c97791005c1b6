"""The report of a GPU's measurements: one that fails or hangs does not end the others."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return import_module("benchmarks.gpu_report")


def script(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_a_measurement_that_fails_or_hangs_does_not_end_the_others(report: Any, tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    measurements = [
        report.Measurement("wrong", 30, script(tmp_path, "wrong.py", "print('so far'); raise SystemExit(3)")),
        report.Measurement("slow", 0.5, script(tmp_path, "slow.py", child)),
        report.Measurement("right", 30, script(tmp_path, "right.py", "print('42 tokens/s')")),
    ]
    started = time.monotonic()
    wrong, slow, right = report.run_all(measurements, tmp_path / "out", 90)
    assert time.monotonic() - started < 50, "the child of a stopped measurement was waited for"
    assert wrong.startswith("wrong: failed with exit code 3")
    assert slow.startswith("slow: stopped after")
    assert right.startswith("right: ")
    assert (tmp_path / "out" / "wrong.log").read_text() == "so far\n"
    assert (tmp_path / "out" / "right.log").read_text() == "42 tokens/s\n"


def test_measurements_for_which_there_is_no_time_are_named(report: Any, tmp_path: Path) -> None:
    assert report.run_all([report.Measurement("late", 9, "-c 0")], tmp_path, 1) == ["late: no time left"]


def test_all_tests_of_gpus_and_all_parts_of_the_users_path_are_in_it(report: Any) -> None:
    commands = " ".join(each.command for each in report.MEASUREMENTS)
    files = [path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")]
    parts = [f"--only {part} " for part in import_module("benchmarks.user_path").PARTS]
    assert len(files) >= 10
    assert [name for name in (*files, *parts) if name not in commands] == []


def test_every_command_is_understood(report: Any, tmp_path: Path) -> None:
    """Their flags, without a GPU: benchmarks print their help, and test files exist."""
    for each in report.MEASUREMENTS:
        words = shlex.split(each.command.format(out=tmp_path))
        if "pytest" in words:
            assert (ROOT / words[-1]).is_file(), each
            continue
        done = subprocess.run(
            [sys.executable, *words, "--help"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (each, done.stderr[-500:])
        flags = [word for word in words if word.startswith("--")]
        assert all(flag in done.stdout for flag in flags), each
