"""All measurements and tests of one GPU, one after the other, in a limited time: a JSON file and a log of all of them.

    python -m benchmarks gpu_report --group 1 [--minutes 9] [--out build/gpu_report]     # then 2, 3, 4
    python -m benchmarks gpu_report --only defaults,products
    python -m benchmarks gpu_report --list                                                # groups, seconds, commands

Each measurement is a process of its own with a time limit. One that fails or is stopped does not end the others, and
keeps the rows that it has finished. Each group takes less than nine minutes on an H200 with 16 cores; within a group,
measurements without any figure come first, and some files of tests run at once (`gpu_measurements`). All measurements
of a group that need a model use one file of it, which the first of them makes. OUT.json (for each measurement: how it
ended, seconds, rows; of tests: which failed) and OUT.log are complete after each measurement, also when this process
is told to end (SIGTERM): then it stops what is running, and keeps its rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from threading import Event, Lock
from typing import IO, Any
from xml.etree import ElementTree

from benchmarks.gpu_measurements import GROUPS, MEASUREMENTS, Measurement, crowds, expected_seconds
from benchmarks.watching import wait_for_compilers

_MIN_SECONDS = 20.0  # with less left, no measurement begins
_COMPILING_SECONDS = 20.0  # that a measurement waits for compile processes of the one before it
_GRACE_SECONDS = 8.0  # from the interrupt, after which pytest writes what it has, to the end
_MAX_LOG_BYTES = 1 << 20  # of one measurement
_MAX_MESSAGE = 600  # characters of a failed test's message
_MAX_SAID, _MAX_LINES = 230, 24  # characters of a row, rows of a measurement that are printed
_DETAILS = (
    "trace",
    "imported",
    "stderr",
    "kernels",
    "notices",
    "host_peak_mib",
    "n_steps",
    "kernel_core_s",
    "devices",
)
_TURN = 0.5  # seconds between looks at whether this process should end


class Report:
    """What the measurements gave, in two files: PATH.json and PATH.log."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path.with_name(f"{path.name}.json")
        self.log = path.with_name(f"{path.name}.log")
        self.log.write_bytes(b"")
        self._lock = Lock()
        self._content: dict[str, Any] = {"machine": machine(), "measurements": {}}

    def add(self, measurement: Measurement, log: bytes = b"", **found: Any) -> None:
        """Adds a measurement with its output, and writes the files."""
        with self._lock:
            self._content["measurements"][measurement.name] = {"command": measurement.command, **found}
            unfinished = self._path.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(self._content, indent=1) + "\n", encoding="utf-8")
            unfinished.replace(self._path)
            with self.log.open("ab") as file:
                file.write(f"\n=== {measurement.name}: python {measurement.command}\n".encode() + log)


def machine() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        gpus = "unknown"
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "gpus": gpus,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("torch", "triton")},
        "free_disk_gib": round(shutil.disk_usage(Path.home()).free / 2**30, 1),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def run_all(measurements: Sequence[Measurement], path: Path, seconds: float) -> list[str]:
    """Runs the measurements while there is time. Returns a line for each."""
    report = Report(path)
    end = time.monotonic() + seconds
    lines: list[str] = []
    with _told_to_end() as is_over:
        for crowd in crowds(measurements):
            wait_for_compilers(min(_COMPILING_SECONDS, end - time.monotonic()))
            with ThreadPoolExecutor(len(crowd)) as threads:
                lines += threads.map(lambda each: run_one(each, report, end, is_over), crowd)
    return lines


@contextlib.contextmanager
def _told_to_end() -> Iterator[Event]:
    """An event that SIGTERM sets."""
    is_over = Event()
    before = signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    try:
        yield is_over
    finally:
        signal.signal(signal.SIGTERM, before)


def run_one(measurement: Measurement, report: Report, end: float, is_over: Event) -> str:
    """Runs a measurement and all processes that it starts, no longer than it may. Says and returns how it ended."""
    left = end - time.monotonic()
    if left < _MIN_SECONDS or is_over.is_set():
        report.add(measurement, outcome="no time left")
        line = f"{measurement.name}: no time left"
        print(line, flush=True)
        return line
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        words = [sys.executable, *measurement.command.format(out=folder).split()]
        process = subprocess.Popen(
            words, stdout=log, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
        outcome = _wait(process, min(measurement.limit, left - _GRACE_SECONDS), is_over)
        seconds = round(time.monotonic() - started, 1)
        rows = {path.stem: _read_json(path) for path in sorted(Path(folder).glob("*.json"))}
        tests = _read_tests(Path(folder) / "tests.xml")
        found = {"rows": rows} if rows else {"tests": tests} if tests else {}
        report.add(measurement, _shortened(log), outcome=outcome, seconds=seconds, **found)
    counts = f" ({tests['counts']})" if tests else ""
    line = f"{measurement.name}: {outcome}, {seconds:.0f} s of {measurement.seconds:.0f}{counts}"
    print("\n".join([line, *_told(rows, tests)]), flush=True)
    return line


def _told(rows: dict[str, Any], tests: dict[str, Any]) -> list[str]:
    """What is printed besides, in case that the files are lost: rows without their details, and failed tests."""
    said = [f"  FAILED {name}: {why[:200]!r}" for name, why in tests.get("failed", {}).items()]
    for found in rows.values():
        said += [f"  {name}: {json.dumps(_numbers(row))[:_MAX_SAID]}" for name, row in _named(found)]
    return said[:_MAX_LINES]


def _named(found: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Rows, which may be in parts (`user_path`)."""
    for key, row in found.items() if isinstance(found, dict) else ():
        is_part = isinstance(row, dict) and any(isinstance(each, dict) for each in row.values())
        yield from _named(row, f"{name}{key}, ") if is_part else [(f"{name}{key}", row)]
    if isinstance(found, list):
        yield from ((f"{name}{number}", row) for number, row in enumerate(found))


def _numbers(row: Any) -> Any:
    """A row without long texts."""
    if isinstance(row, dict):
        kept = {key: _numbers(each) for key, each in row.items() if key not in _DETAILS}
        return {key: each for key, each in kept.items() if each not in (None, [], {})}
    return row[:80] if isinstance(row, str) else row


def environment() -> dict[str, str]:
    """As after an installation: bytecode is kept, and Triton compiles."""
    own = os.environ | {"PYTHONUNBUFFERED": "1", "TRITON_INTERPRET": "0"}
    own.pop("PYTHONDONTWRITEBYTECODE", None)
    return own


def _wait(process: subprocess.Popen[bytes], seconds: float, is_over: Event) -> str:
    """How the process ended; afterwards none of the processes that it started is left."""
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and not is_over.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(_TURN)
                return f"failed with exit code {code}" if code else "done"
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "stopped"


def _shortened(log: IO[bytes]) -> bytes:
    """The output; of a long one the beginning and the end."""
    log.seek(0)
    content = log.read()
    half = _MAX_LOG_BYTES // 2
    return content if len(content) <= _MAX_LOG_BYTES else content[:half] + b"\n[...]\n" + content[-half:]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # stopped while it was written
        return {"error": str(error)}


def _read_tests(path: Path) -> dict[str, Any]:
    """Numbers of tests by outcome, the failed ones with their messages, and what tests have recorded."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return {}
    counts = dict.fromkeys(("passed", "failed", "error", "skipped"), 0)
    failed, noted, slow = {}, {}, []
    for case in cases:
        name = case.get("name", "")
        slow.append((float(case.get("time", "0")), name))
        outcome = "passed"
        for tag in ("skipped", "error", "failure"):
            if (element := case.find(tag)) is not None:
                outcome = "failed" if tag == "failure" else tag
                if tag != "skipped":
                    failed[name] = element.get("message", "")[:_MAX_MESSAGE]
        counts[outcome] += 1
        if properties := {p.get("name", ""): p.get("value") for p in case.iter("property")}:
            noted[name] = properties
    return {
        "counts": ", ".join(f"{n} {outcome}" for outcome, n in counts.items() if n) or "no tests",
        "failed": failed,
        "noted": noted,
        "slowest": [[name, round(seconds, 1)] for seconds, name in sorted(slow, reverse=True)[:5]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--group", type=int, choices=GROUPS, help="default: all measurements")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("build/gpu_report"), help="OUT.json and OUT.log")
    parser.add_argument("--only", default="", metavar="NAME,…", help="these, in this order")
    parser.add_argument("--list", action="store_true", help="print groups, seconds and commands")
    flags = parser.parse_args()
    by_name = {each.name: each for each in MEASUREMENTS}
    in_group = [each.name for each in MEASUREMENTS if flags.group in (None, each.group)]
    names = [name for name in flags.only.split(",") if name] or in_group
    if unknown := sorted(set(names) - set(by_name)):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(by_name)}")
    chosen = [by_name[name] for name in names]
    if flags.list:
        for each in chosen:
            print(
                f"{each.group or '-'} {each.name:<19} {each.seconds:>4.0f} s (at most {each.limit:.0f})  "
                f"python {each.command}"
            )
        print(f"{expected_seconds(chosen):.0f} s expected")
        return
    run_all(chosen, flags.out, 60 * flags.minutes)


if __name__ == "__main__":
    main()
