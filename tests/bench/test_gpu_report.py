"""The report of a GPU's measurements: one that fails or hangs does not end the others."""

from __future__ import annotations

import json
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


def written(path: Path) -> tuple[dict[str, Any], str]:
    """The measurements of the report, and its log."""
    content = json.loads(path.with_name(f"{path.name}.json").read_text())
    return content["measurements"], path.with_name(f"{path.name}.log").read_text()


def test_a_measurement_that_fails_or_hangs_does_not_end_the_others(report: Any, tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    measurements = [
        report.Measurement(
            "wrong", 1, 9, 30, script(tmp_path, "wrong.py", "print('so far'); raise SystemExit(3)")
        ),
        report.Measurement("slow", 1, 9, 0.5, script(tmp_path, "slow.py", child)),
        report.Measurement("right", 1, 9, 30, script(tmp_path, "right.py", "print('42 tokens/s')")),
    ]
    started = time.monotonic()
    wrong, slow, right = report.run_all(measurements, tmp_path / "out", 90)
    assert time.monotonic() - started < 50, "the child of a stopped measurement was waited for"
    assert wrong.startswith("wrong: failed with exit code 3")
    assert slow.startswith("slow: stopped")
    assert right.startswith("right: done")
    found, log = written(tmp_path / "out")
    assert [each["outcome"] for each in found.values()] == ["failed with exit code 3", "stopped", "done"]
    assert "so far\n" in log
    assert "42 tokens/s\n" in log


def test_rows_of_a_measurement_that_is_stopped_are_in_the_report(report: Any, tmp_path: Path) -> None:
    text = """
import sys, time
from pathlib import Path
Path(sys.argv[1], "rows.json").write_text('{"decode": [412.5]}')
Path(sys.argv[1], "half.json").write_text('{"decode": [41')
try:
    time.sleep(60)
finally:
    print("interrupted")
"""
    command = f"{script(tmp_path, 'slow.py', text)} {{out}}"
    (line,) = report.run_all([report.Measurement("slow", 1, 9, 2, command)], tmp_path / "out", 90)
    assert line.startswith("slow: stopped")
    found, log = written(tmp_path / "out")
    assert found["slow"]["rows"]["rows"] == {"decode": [412.5]}
    assert "error" in found["slow"]["rows"]["half"]
    assert "interrupted" in log, "an interrupt comes before the end"


def test_failed_tests_are_in_the_report_with_their_messages(report: Any, tmp_path: Path) -> None:
    text = """
import pytest
def test_right(record_property): record_property("distance", 0.25)
def test_wrong(): assert 1 + 1 == 3, "arithmetic"
@pytest.mark.skip(reason="no GPU")
def test_none(): pass
"""
    path = script(tmp_path, "test_some.py", text)
    command = f"-m pytest -p no:cacheprovider --junitxml={{out}}/tests.xml {path}"
    (line,) = report.run_all([report.Measurement("some", 1, 9, 60, command)], tmp_path / "out", 90)
    assert "1 passed, 1 failed, 1 skipped" in line
    found, _ = written(tmp_path / "out")
    tests = found["some"]["tests"]
    assert list(tests["failed"]) == ["test_wrong"]
    assert "arithmetic" in tests["failed"]["test_wrong"]
    assert tests["noted"] == {"test_right": {"distance": "0.25"}}


def test_a_log_is_not_longer_than_what_can_be_read(report: Any, tmp_path: Path) -> None:
    path = script(tmp_path, "long.py", "print('first'); print('x' * 3_000_000); print('last')")
    measurements = [report.Measurement(name, 1, 9, 60, path) for name in ("one", "two")]
    report.run_all(measurements, tmp_path / "out", 90)
    _, log = written(tmp_path / "out")
    assert len(log) < 2.2 * 2**20
    assert log.count("first\n") == log.count("last\n") == 2


def test_measurements_for_which_there_is_no_time_are_named(report: Any, tmp_path: Path) -> None:
    late = report.Measurement("late", 1, 9, 9, "-c 0")
    assert report.run_all([late], tmp_path / "out", 1) == ["late: no time left"]
    assert written(tmp_path / "out")[0]["late"]["outcome"] == "no time left"


def test_each_group_fits_into_nine_minutes_and_makes_no_file_twice(report: Any) -> None:
    for group in report.GROUPS:
        chosen = [each for each in report.MEASUREMENTS if each.group == group]
        assert sum(each.seconds for each in chosen) <= 535, group
        assert all(each.seconds < each.limit for each in chosen)
    names = [each.name for each in report.MEASUREMENTS]
    assert len(set(names)) == len(names)
    large = {
        each.group
        for each in report.MEASUREMENTS
        if "cuda_experts" in each.command and "glm" not in each.command
    }
    assert large == {2}, "17 GB are written in one group only"


def test_all_tests_of_gpus_and_all_parts_of_the_users_path_are_in_it(report: Any) -> None:
    commands = " ".join(each.command for each in report.MEASUREMENTS) + " "
    in_groups = " ".join(each.command for each in report.MEASUREMENTS if each.group)
    files = [path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")]
    parts = [f"--only {part} " for part in import_module("benchmarks.user_path").PARTS]
    assert len(files) >= 11
    assert [name for name in files if name not in in_groups] == []
    assert [name for name in parts if name not in commands] == []


def test_every_command_is_understood(report: Any, tmp_path: Path) -> None:
    """Their flags, without a GPU: benchmarks print their help, and test files exist."""
    for each in {each.command: each for each in report.MEASUREMENTS}.values():
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
        if "benchmarks.cuda_experts" in words:
            known = {*import_module("benchmarks.cuda_experts").PARTS, "write"}
            assert set(words[words.index("--only") + 1].split(",")) <= known, each
