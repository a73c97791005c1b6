"""The longest standstill of a running request while others come, in the first process of a model and in a second one.

    python -m benchmarks standstill [--device cuda:0,cpu] [--crews layer,tensor,cpu-moe] [--out FILE]

A request runs from the end of loading on, and others come beside it: short ones, several at once, and prompts of
several lengths, first while kernels are still compiled, then after that. Each crew is loaded in a process of its own
with an empty kernel cache, and once more with the cache of the first process. `alone` is one GPU without a CPU.

    longest_gap_s      the longest time between two pieces of the running request
    gaps_over_0.3_s    such times, with what came meanwhile
    longest_step_s     the longest step of the engine
    compiled_by_steps  kernels that a launch has compiled: should be none

Models are random (Q4_K), with the first `--layers` layers of a known shape; their files are kept for later runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.watching import watch_steps

DENSE, EXPERTS = "llama-8b", "qwen3-30b-a3b"
CREWS: dict[str, tuple[str, dict[str, Any]]] = {  # the model's shape, and options
    "alone": (DENSE, {}),
    "layer": (DENSE, {"split_mode": "layer", "tensor_split": (3, 1)}),
    "tensor": (DENSE, {"split_mode": "tensor", "tensor_split": (3, 1)}),
    "cpu-moe": (EXPERTS, {"n_cpu_moe": 99}),
    "some-cpu-moe": (EXPERTS, {"n_cpu_moe": 3}),
}
USUAL = "layer,tensor,cpu-moe"
TOO_LONG = 0.3  # seconds
OTHERS = (
    (1, 16),
    (2, 16),
    (4, 16),
    (8, 16),
    (1, 40),
    (1, 100),
    (1, 300),
    (1, 700),
    (3, 200),
)  # requests, prompt
N_CTX = 32768  # of the running request, which is ended by us


class Running:
    """A request that runs on a thread, with the times of its pieces."""

    def __init__(self, llm: Any, prompt: list[int]) -> None:
        self.times: list[float] = []
        self._stream = llm.stream(prompt, max_tokens=N_CTX - 64, ignore_eos=True, temperature=0.0)
        self._is_over = threading.Event()
        self.has_ended = False  # by itself: others ran without it
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        for _ in self._stream.until(self._is_over.is_set):
            self.times.append(time.perf_counter())
        self.has_ended = not self._is_over.is_set()

    def wait_for_first(self, seconds: float) -> None:
        """Wait for the first piece."""
        end = time.perf_counter() + seconds
        while not self.times and time.perf_counter() < end and self._thread.is_alive():
            time.sleep(0.005)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._stream.close()


def long_gaps(times: list[float], marks: list[tuple[float, str]], threshold: float = TOO_LONG) -> list[Any]:
    """The times between pieces beyond a threshold: seconds, and the latest mark before the end of each."""
    found = []
    for before, after in pairwise(times):
        if after - before > threshold:
            latest = [name for at, name in marks if at <= after]
            found.append([round(after - before, 3), latest[-1] if latest else "the first tokens"])
    return found


def serve(llm: Any, phase: str) -> dict[str, Any]:
    """Runs a request, and all `OTHERS` beside it, one after the other."""
    steps, rng, marks = watch_steps(llm._loaded.engine), random.Random(phase), []
    n_vocab = llm._loaded.engine.n_vocab

    def prompt(n: int) -> list[int]:
        return [rng.randrange(256, n_vocab) for _ in range(n)]

    started = time.perf_counter()
    running = Running(llm, prompt(8))
    running.wait_for_first(120)
    try:
        for n_requests, n_tokens in OTHERS:
            marks.append((time.perf_counter(), f"{n_requests} requests of {n_tokens}"))
            prompts = [prompt(n_tokens) for _ in range(n_requests)]
            done = llm.generate(prompts, max_tokens=8, ignore_eos=True, seed=1)
            failed = [str(each.error) for each in done if each.error is not None]
            if failed:
                raise RuntimeError(failed[0])
    finally:
        running.close()
    gaps = [after - before for before, after in pairwise(running.times)]
    return {
        "first_piece_s": round(running.times[0] - started, 3) if running.times else None,
        "longest_gap_s": round(max(gaps, default=0.0), 3),
        "gaps_over_0.3_s": long_gaps(running.times, marks),
        "longest_step_s": round(max((seconds for *_, seconds in steps), default=0.0), 3),
        "seconds": round(time.perf_counter() - started, 1),
        "pieces": len(running.times),
        "has_ended_early": running.has_ended,
    }


def watch_compilations() -> list[str]:
    """The names of kernels that this process itself compiles from now on."""
    compiled: list[str] = []
    try:
        from triton import knobs
    except ImportError:
        return compiled
    knobs.compilation.listener = lambda *, src, cache_hit, **_: cache_hit or compiled.append(src.name)
    return compiled


def measure(crew: str, model: Path, device: str, out: Path) -> None:
    """A process: load, requests while kernels are compiled, requests after that."""
    from motley import LLM

    rows: dict[str, Any] = {}

    def write() -> None:
        out.write_text(json.dumps(rows))

    own = device.split(",")[0] if crew == "alone" else device
    types = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    with LLM(model, devices=own, n_ctx=N_CTX, n_parallel=16, **types, **CREWS[crew][1]) as llm:
        compiled = watch_compilations()
        warm_up = llm.warm_up
        rows |= {"load_s": round(llm.load_seconds, 2), "compiles_ahead": llm.compiles_ahead}
        rows |= {"kernels_at_first": len(warm_up.kernels), "details": llm.details}
        write()
        for phase in ("while kernels are compiled", "after that"):
            rows[phase] = serve(llm, phase)
            rows[phase]["compiled_by_steps"] = sorted(compiled)
            compiled.clear()
            write()
            llm.finish_compiling()
        rows |= {"kernels": len(llm.warm_up.kernels), "failures": llm.warm_up.notices}
        write()


def make_model(shape: str, n_layers: int) -> Path:
    from motley.bench import random_model_path, write_random_model

    path = random_model_path(shape, "Q4_K", n_layers)
    if not path.exists():
        write_random_model(path, shape, "Q4_K", n_layers=n_layers)
    with path.open("rb", buffering=0) as file:  # reads the file into the page cache
        while file.read(1 << 26):
            pass
    return path


def run_process(crew: str, args: argparse.Namespace, model: Path, cache: str) -> dict[str, Any]:
    """What a process of its own has measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.standstill", "--device", args.device]
        command += ["--part", crew, "--model", str(model), "--out", str(out)]
        environment = os.environ | {"TRITON_CACHE_DIR": cache}
        failure = None
        try:
            done = subprocess.run(command, env=environment, timeout=args.limit, check=False)
            failure = f"exit code {done.returncode}" if done.returncode else None
        except subprocess.TimeoutExpired:
            failure = f"longer than {args.limit} s"
        rows: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    return rows | ({"failure": failure} if failure else {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0,cpu")
    parser.add_argument("--crews", default=USUAL, help=f"of {', '.join(CREWS)}")
    parser.add_argument("--layers", type=int, default=8, help="of the random models")
    parser.add_argument("--model", type=Path, help="a file, instead of random weights")
    parser.add_argument("--limit", type=int, default=90, help="seconds for each process")
    parser.add_argument("--out", type=Path, default=Path("standstill.json"))
    parser.add_argument("--part", choices=list(CREWS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        measure(args.part, args.model, args.device, args.out)
        return
    chosen = [crew for crew in args.crews.split(",") if crew]
    if unknown := sorted(set(chosen) - set(CREWS)):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(CREWS)}")
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d %H:%M"), "cores": os.cpu_count()}
    for crew in chosen:
        model = args.model or make_model(CREWS[crew][0], args.layers)
        with tempfile.TemporaryDirectory() as cache:
            for process in ("first process", "second process"):
                row = report[f"{crew}, {process}"] = run_process(crew, args, model, cache)
                print(f"{crew}, {process}: {json.dumps(row)[:700]}", flush=True)
                args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
