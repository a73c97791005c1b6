"""The report of a GPU's measurements: one that fails or hangs does not end the others."""

from __future__ import annotations

import json
import os
import re
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


def test_a_crowd_runs_at_once(report: Any, tmp_path: Path) -> None:
    """Each waits for a file of the other one."""
    text = """
import sys, time
from pathlib import Path
own, other = map(Path, sys.argv[1:])
own.touch()
while not other.exists():
    time.sleep(0.01)
"""
    path, a, b = script(tmp_path, "wait.py", text), tmp_path / "a", tmp_path / "b"
    measurements = [
        report.Measurement("one", 1, 9, 30, f"{path} {a} {b}", "crowd"),
        report.Measurement("two", 1, 9, 30, f"{path} {b} {a}", "crowd"),
        report.Measurement("alone", 1, 9, 30, "-c 0"),
    ]
    lines = report.run_all(measurements, tmp_path / "out", 90)
    assert [line.split(",")[0] for line in lines] == ["one: done", "two: done", "alone: done"]


def test_what_is_running_is_kept_when_the_report_is_told_to_end(report: Any, tmp_path: Path) -> None:
    text = """
import os, signal, sys, time
from pathlib import Path
Path(sys.argv[1], "rows.json").write_text('{"decode": {"rate": 412.5}}')
print("begun", flush=True)
os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)
"""
    command = f"{script(tmp_path, 'slow.py', text)} {{out}}"
    measurements = [report.Measurement(name, 1, 9, 50, command) for name in ("first", "second")]
    report.run_all(measurements, tmp_path / "out", 90)
    found, log = written(tmp_path / "out")
    assert [each["outcome"] for each in found.values()] == ["stopped", "no time left"]
    assert found["first"]["rows"]["rows"]["decode"] == {"rate": 412.5}
    assert log.count("begun") == 1


def test_rows_and_failed_tests_are_printed_as_they_come(
    report: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"warm": {"1 request": {"tokens_per_s": 530.1, "trace": "long"}, "failure": "exit code 1"}, "n": 3}
    text = f"import sys; open(sys.argv[1] + '/rows.json', 'w').write({json.dumps(rows)!r})"
    command = f"{script(tmp_path, 'rows.py', text)} {{out}}"
    report.run_all([report.Measurement("user", 1, 9, 30, command)], tmp_path / "out", 90)
    said = capsys.readouterr().out
    assert '  warm, 1 request: {"tokens_per_s": 530.1}\n' in said
    assert '  warm, failure: "exit code 1"\n' in said
    assert "  n: 3\n" in said
    path = script(tmp_path, "test_wrong.py", "def test_wrong(): assert 1 + 1 == 3, 'arithmetic'")
    command = f"-m pytest -p no:cacheprovider --junitxml={{out}}/tests.xml {path}"
    report.run_all([report.Measurement("some", 1, 9, 60, command)], tmp_path / "out", 90)
    assert "  FAILED test_wrong: " in capsys.readouterr().out


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
    expected = import_module("benchmarks.gpu_measurements").expected_seconds
    for group in report.GROUPS:
        chosen = [each for each in report.MEASUREMENTS if each.group == group]
        assert expected(chosen) <= 500, group
        assert all(each.seconds < each.limit for each in chosen)
    names = [each.name for each in report.MEASUREMENTS]
    assert len(set(names)) == len(names)
    assert {each.group for each in report.MEASUREMENTS} == set(report.GROUPS)
    large = {
        each.group
        for each in report.MEASUREMENTS
        if "cuda_experts" in each.command and not re.search("glm|--only tiles", each.command)
    }
    assert large == {3}, "17 GB are written in one group only"


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
