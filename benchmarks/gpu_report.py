"""All measurements of one GPU that the documents show, one after the other, in a limited time.

    python -m benchmarks gpu_report [--minutes 9] [--out FOLDER] [--only NAME,…] [--list]

Each measurement is a process of its own with a time limit; its output goes to FOLDER/NAME.log. Measurements whose
figures are missing or oldest come first, so that a short run is worth most. One that fails or is stopped does not end
the others. At the end, a line for each says how it went.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_MIN_SECONDS = 20.0  # with less left, no measurement begins


class Measurement(NamedTuple):
    """A command of Python (`python …`), and the seconds that it may take. `{out}` in it: the folder of results."""

    name: str
    seconds: float
    command: str


_8B = "--shape llama-8b --weights Q4_K --cache-type q8_0"
_TESTS = "-m pytest -q -n 4 tests/gpu/test_on_gpu_"
MEASUREMENTS = (
    Measurement(
        "defaults", 100, "-m benchmarks user_path --only import --only defaults --out {out}/defaults.json"
    ),
    Measurement("products", 180, f"{_TESTS}products.py"),
    Measurement("sampling", 120, f"{_TESTS}sampling.py"),
    Measurement("memory", 120, "-m pytest -q tests/gpu/test_on_gpu_memory.py"),
    Measurement("crews", 120, "-m pytest -q tests/gpu/test_on_gpu_beside_cpu.py"),
    Measurement("models", 180, f"{_TESTS}models.py"),
    Measurement("cli", 120, "-m pytest -q tests/gpu/test_on_gpu_cli.py"),
    Measurement("experts", 120, f"{_TESTS}experts.py"),
    Measurement("states", 120, f"{_TESTS}states.py"),
    Measurement("bundles", 120, f"{_TESTS}bundles.py"),
    Measurement(
        "user_path", 240, "-m benchmarks user_path --only warm --only long --out {out}/user_path.json"
    ),
    Measurement("experts_beside_cpu", 120, "-m benchmarks cuda_experts --only beside"),
    Measurement("experts_requests", 120, "-m benchmarks cuda_experts --requests 8,64 --depths 0"),
    Measurement("first_process", 60, "-m benchmarks user_path --only run --out {out}/first_process.json"),
    Measurement("standstill", 120, "-m benchmarks user_path --only cold --out {out}/standstill.json"),
    Measurement("kernel_steps", 120, "benchmarks/cuda_model.py --only steps --out {out}/kernel_steps.json"),
    Measurement(
        "drafts_deep",
        100,
        f"-m benchmarks speculation --device cuda:0 {_8B} --right 0.8 --depth 0,122880 --tokens 512 --rounds 2",
    ),
    Measurement("drafts_texts", 120, "-m pytest -q tests/gpu/test_on_gpu_drafts.py"),
    Measurement("experts_all", 180, "-m benchmarks cuda_experts"),
)


def run_all(measurements: Sequence[Measurement], folder: Path, seconds: float) -> list[str]:
    """Runs the measurements while there is time. Returns a line for each."""
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    lines = []
    for each in measurements:
        left = end - time.monotonic()
        lines.append(run_one(each, folder, left) if left >= _MIN_SECONDS else f"{each.name}: no time left")
        print(lines[-1], flush=True)
    return lines


def run_one(measurement: Measurement, folder: Path, seconds_left: float) -> str:
    """Runs a measurement, and all processes that it starts, no longer than it may. Returns how it went."""
    name, limit, command = measurement
    words = [sys.executable, *command.format(out=folder).split()]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TRITON_INTERPRET": "0"}
    started = time.monotonic()
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            words, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(min(limit, seconds_left))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"{name}: stopped after {time.monotonic() - started:.0f} s"
    took = f"{time.monotonic() - started:.0f} s"
    return f"{name}: {took}" if not code else f"{name}: failed with exit code {code} after {took}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("build/gpu_report"))
    parser.add_argument("--only", default="", metavar="NAME,…", help="these, in this order")
    parser.add_argument("--list", action="store_true", help="print the commands")
    flags = parser.parse_args()
    by_name = {each.name: each for each in MEASUREMENTS}
    names = [name for name in flags.only.split(",") if name] or list(by_name)
    if unknown := sorted(set(names) - set(by_name)):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(by_name)}")
    if flags.list:
        for name in names:
            print(f"{name:<20} python {by_name[name].command.format(out=flags.out)}")
        return
    lines = run_all([by_name[name] for name in names], flags.out, 60 * flags.minutes)
    (flags.out / "summary.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
