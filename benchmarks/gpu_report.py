"""All measurements and tests of one GPU, one after the other, in a limited time: a JSON file and a log of all of them.

    python -m benchmarks gpu_report --group 1 [--minutes 9] [--out build/gpu_report]     # then 2, 3, 4
    python -m benchmarks gpu_report --only defaults,products
    python -m benchmarks gpu_report --list                                                # groups, seconds, commands

Each measurement is a process of its own with a time limit. One that fails or is stopped does not end the others, and
keeps the rows that it has finished. Each group takes less than nine minutes on an H200 with 16 cores; within a group,
measurements without any figure come first. All measurements of a group that need a model use one file of it, which the
first of them makes. OUT.json (for each measurement: how it ended, seconds, rows; of tests: which failed) and OUT.log
are complete after each measurement.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

_MIN_SECONDS = 20.0  # with less left, no measurement begins
_GRACE_SECONDS = 8.0  # from the interrupt, after which pytest writes what it has, to the end
_MAX_LOG_BYTES = 1 << 20  # of one measurement
_MAX_MESSAGE = 600  # characters of a failed test's message


class Measurement(NamedTuple):
    """A command of Python (`python …`). `{out}` in it: the folder into which it writes JSON files."""

    name: str
    group: int  # 0: in no group, because it has a recent figure
    seconds: float  # that it is expected to take
    limit: float  # the seconds after which it is stopped
    command: str


def _tests(name: str, group: int, seconds: float, limit: float, n_workers: int = 4) -> Measurement:
    """A file of tests. `-vv`: pyproject.toml has `-q`, and each test's outcome should be in the log at once."""
    workers = f" -n {n_workers}" if n_workers else ""
    command = f"-m pytest -vv{workers} --junitxml={{out}}/tests.xml tests/gpu/test_on_gpu_{name}.py"
    return Measurement(name, group, seconds, limit, command)


_8B = "--shape llama-8b --weights Q4_K --cache-type q8_0"
_USER = "-m benchmarks user_path --out {out}/rows.json"
_EXPERTS = "-m benchmarks.cuda_experts --out {out}/rows.json"
_BATCH = f"{_EXPERTS} --only batch --requests 8,64"
# Seconds are estimated from benchmarks/results/cuda-notes.md and the JSON files beside it: a file of 8B takes 15 s, one
# of 30B (17 GB) 50, 16 of GLM-4.5-Air's 46 layers (27 GB) 70; loading and compiling 10 to 20 s the first time.
MEASUREMENTS = (
    # 1: what was never measured, or long ago, with the 8B model
    _tests("expert_models", 1, 90, 150),
    Measurement(
        "user", 1, 190, 290, f"{_USER} --limit 150 --only defaults --only warm --only run --only import"
    ),
    Measurement(
        "drafts_deep",
        1,
        80,
        140,
        f"-m benchmarks speculation --device cuda:0 {_8B} --right 0.8 --depth 122880,0 --tokens 512 --rounds 3 "
        "--json {out}/rows.json",
    ),
    _tests("products", 1, 120, 180),
    # 2: the 30B model with experts
    Measurement("experts_file", 2, 50, 150, f"{_EXPERTS} --only write"),
    Measurement("experts_beside_cpu", 2, 90, 170, f"{_EXPERTS} --only beside"),
    Measurement("experts_batch_1", 2, 40, 90, _BATCH),
    Measurement("experts_batch_2", 2, 30, 90, _BATCH),
    Measurement("experts_batch_3", 2, 30, 90, _BATCH),
    _tests("beside_cpu", 2, 60, 120, 0),
    _tests("experts", 2, 60, 120),
    Measurement("experts_rows", 2, 60, 120, f"{_EXPERTS} --only check,decode,prompt,crews"),
    _tests("models", 2, 90, 150),
    # 3: GLM's shapes, and the other tests
    _tests("cli", 3, 90, 150, 0),
    Measurement(
        "experts_glm",
        3,
        140,
        220,
        f"{_EXPERTS} --shape glm-4.5-air --layers 16 --depths 0 --requests 8 --only decode,batch,prompt",
    ),
    _tests("sampling", 3, 60, 120),
    _tests("memory", 3, 45, 90, 0),
    _tests("states", 3, 60, 120),
    _tests("bundles", 3, 40, 90),
    _tests("drafts", 3, 60, 120, 0),
    # 4: a GPU beside a CPU, which was not measured since its kernels are compiled ahead
    _tests("compiled_ahead", 4, 120, 240, 0),
    Measurement("standstill_crews", 4, 330, 540, "-m benchmarks standstill --limit 85 --out {out}/rows.json"),
    # These have recent figures.
    Measurement("long", 0, 50, 120, f"{_USER} --only long"),
    Measurement("standstill", 0, 60, 120, f"{_USER} --only cold"),
    Measurement("kernel_steps", 0, 120, 180, "benchmarks/cuda_model.py --only steps --out {out}/rows.json"),
)
GROUPS = (1, 2, 3, 4)


class Report:
    """What the measurements gave, in two files: PATH.json and PATH.log."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path.with_name(f"{path.name}.json")
        self.log = path.with_name(f"{path.name}.log")
        self.log.write_bytes(b"")
        self._content: dict[str, Any] = {"machine": machine(), "measurements": {}}

    def add(self, measurement: Measurement, **found: Any) -> None:
        """Adds a measurement, and writes the file."""
        self._content["measurements"][measurement.name] = {"command": measurement.command, **found}
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(self._content, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self._path)


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
        "free_disk_gib": round(shutil.disk_usage(Path.home()).free / 2**30, 1),
    }


def run_all(measurements: Sequence[Measurement], path: Path, seconds: float) -> list[str]:
    """Runs the measurements while there is time. Returns a line for each."""
    report = Report(path)
    end = time.monotonic() + seconds
    lines = []
    for each in measurements:
        left = end - time.monotonic()
        if left < _MIN_SECONDS:
            report.add(each, outcome="no time left")
            lines.append(f"{each.name}: no time left")
        else:
            lines.append(run_one(each, report, left))
        print(lines[-1], flush=True)
    return lines


def run_one(measurement: Measurement, report: Report, seconds_left: float) -> str:
    """Runs a measurement and all processes that it starts, no longer than it may. Returns how it ended."""
    limit = min(measurement.limit, seconds_left - _GRACE_SECONDS)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, *measurement.command.format(out=folder).split()]
        with report.log.open("ab") as log:
            log.write(f"\n=== {measurement.name}: python {' '.join(words[1:])}\n".encode())
            log.flush()
            start = log.tell()
            process = subprocess.Popen(
                words, stdout=log, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
            )
            outcome = _wait(process, limit)
        _shorten(report.log, start)
        seconds = round(time.monotonic() - started, 1)
        rows = {path.stem: _read_json(path) for path in sorted(Path(folder).glob("*.json"))}
        tests = _read_tests(Path(folder) / "tests.xml")
    found = {"rows": rows} if rows else {"tests": tests} if tests else {}
    report.add(measurement, outcome=outcome, seconds=seconds, **found)
    counts = f" ({tests['counts']})" if tests else ""
    return f"{measurement.name}: {outcome}, {seconds:.0f} s of {measurement.seconds:.0f}{counts}"


def environment() -> dict[str, str]:
    """As after an installation: bytecode is kept, and Triton compiles."""
    own = os.environ | {"PYTHONUNBUFFERED": "1", "TRITON_INTERPRET": "0"}
    own.pop("PYTHONDONTWRITEBYTECODE", None)
    return own


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str:
    """How the process ended; afterwards none of the processes that it started is left."""
    try:
        try:
            code = process.wait(seconds)
            return f"failed with exit code {code}" if code else "done"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "stopped"


def _shorten(log: Path, start: int) -> None:
    """Leaves the beginning and the end of what follows `start`."""
    content = log.read_bytes()
    if len(content) - start <= _MAX_LOG_BYTES:
        return
    half = _MAX_LOG_BYTES // 2
    log.write_bytes(content[: start + half] + b"\n[...]\n" + content[-half:])


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
        print(f"{sum(each.seconds for each in chosen):.0f} s expected")
        return
    run_all(chosen, flags.out, 60 * flags.minutes)


if __name__ == "__main__":
    main()
