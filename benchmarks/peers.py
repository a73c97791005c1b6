"""Motley beside llama.cpp on the same file, threads and cache types, turn by turn in one run.

The machine's mood changes over minutes, so only ratios of neighbouring turns count: each round times one engine, then
the other, and the table shows the median of the rounds' ratios with their range. llama.cpp comes from the PyPI package
llama-cpp-python (its CPU build); give the interpreter that has it:

    python -m venv peers && peers/bin/pip install llama-cpp-python
    python -m benchmarks peers --python peers/bin/python --shape llama-1b --weights Q4_0,Q8_0,Q4_K
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from motley.bench.shapes import write_random_model

FOLDER = Path(__file__).parent


class Engine:
    """A worker process of one engine."""

    def __init__(self, python: str, script: str, **options: Any) -> None:
        command = [python, str(FOLDER / script), json.dumps(options)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.seconds_to_load: float = self._answer()["load"]

    def time(self, n_tokens: int, times: int, before: list[int]) -> list[float]:
        """Seconds of each of `times` passes of n_tokens, after passes of the sizes in `before`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"n_tokens": n_tokens, "times": times, "before": before}) + "\n")
        self._process.stdin.flush()
        seconds: list[float] = self._answer()["seconds"]
        return seconds

    def peak_bytes(self) -> int:
        """The most memory that was resident, as the system counts it."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(frozen=True)
class Row:
    """One workload's tokens per second, by round: ours and theirs."""

    name: str
    ours: list[float]
    theirs: list[float]

    def __str__(self) -> str:
        ratios = sorted(a / b for a, b in zip(self.ours, self.theirs, strict=True))
        figures = f"{median(self.ours):9.1f} {median(self.theirs):9.1f}"
        return f"{self.name:<44} {figures} {median(ratios):7.2f}  ({ratios[0]:.2f} … {ratios[-1]:.2f})"


def compare(ours: Engine, theirs: Engine, args: argparse.Namespace, label: str) -> list[Row]:
    depth = [512] * (args.depth // 512)
    workloads = [
        (f"prompt {args.n_prompt}", args.n_prompt, 1, []),
        (f"decode {args.n_gen}", 1, args.n_gen, [8]),
    ]
    if depth:
        workloads.append((f"decode {args.n_gen} at {args.depth}", 1, args.n_gen, depth))
    rows = []
    for name, n_tokens, times, before in workloads:
        rates: dict[Engine, list[float]] = {ours: [], theirs: []}
        for engine in (ours, theirs):
            engine.time(n_tokens, 1, [])  # plans, page faults
        for _ in range(args.rounds):
            for engine in (ours, theirs):
                rates[engine].append(n_tokens / median(engine.time(n_tokens, times, before)))
        rows.append(Row(f"{label} {name}", rates[ours], rates[theirs]))
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="interpreter that has llama-cpp-python")
    parser.add_argument("--shape", default="llama-160m")
    parser.add_argument("--weights", default="Q8_0,Q4_0,Q4_K", help="formats, by comma")
    parser.add_argument("--model", help="a GGUF file instead of random weights")
    parser.add_argument("--cache-types", default="f16", help="by comma")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--n-prompt", type=int, default=512)
    parser.add_argument("--n-gen", type=int, default=16)
    parser.add_argument("--depth", type=int, default=0, help="also decode after so many tokens")
    parser.add_argument("--no-flash", action="store_true", help="llama.cpp without flash attention")
    args = parser.parse_args()
    print(f"{'':<44} {'motley':>9} {'llama.cpp':>9} {'ratio':>7}  (range over {args.rounds} rounds)")
    for weights in [""] if args.model else args.weights.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path = args.model or str(Path(folder) / "model.gguf")
            if not args.model:
                write_random_model(Path(path), args.shape, weights)
            for cache_type in args.cache_types.split(","):
                shared = {
                    "model": path,
                    "n_threads": args.threads,
                    "n_ctx": args.depth + 1024,
                    "cache_type": cache_type,
                }
                ours = Engine(sys.executable, "peer_motley.py", **shared)
                theirs = Engine(args.python, "peer_llama_cpp.py", flash=not args.no_flash, **shared)
                name = Path(path).stem if args.model else f"{args.shape} {weights}"
                compare(ours, theirs, args, f"{name} kv {cache_type}")
                loads = f"load {ours.seconds_to_load:.2f} s, {theirs.seconds_to_load:.2f} s"
                peaks = f"peak {ours.peak_bytes() >> 20} MiB, {theirs.peak_bytes() >> 20} MiB"
                print(f"{'':<4}{loads}; {peaks}", flush=True)
                ours.close()
                theirs.close()


if __name__ == "__main__":
    main()
