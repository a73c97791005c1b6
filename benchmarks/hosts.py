"""A crew of two processes against the same crew in one process: decode speed.

Each device has one thread. The second process is a `motley worker` on this machine, or one that already runs elsewhere
(--worker ADDR:PORT, with the model file at the same path there: --model).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from motley import LLM
from motley.bench import Workload, measure, write_random_model


@contextmanager
def worker() -> Iterator[str]:
    """The address of a worker with one thread."""
    command = [sys.executable, "-m", "motley", "worker", "--listen", "127.0.0.1:0", "-t", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        yield re.findall(r"listening on (\S+)", process.stderr.readline())[0]
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-160m")
    parser.add_argument("--weights", default="Q4_0")
    parser.add_argument("--model", type=Path, help="a model file, instead of a random model of --shape")
    parser.add_argument("--modes", default="tensor,layer")
    parser.add_argument("--wire", default="f32")
    parser.add_argument("--worker", help="address and port of a running worker")
    parser.add_argument("--secret-file", type=Path)
    parser.add_argument("--rounds", type=int, default=7, help="times that each crew is timed")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    with ExitStack() as stack:
        path = flags.model
        if path is None:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model.gguf"
            write_random_model(path, flags.shape, flags.weights)
        found: dict[str, dict[str, float]] = {}
        for mode in flags.modes.split(","):
            with ExitStack() as each:
                address = flags.worker or each.enter_context(worker())
                crews: dict[str, dict[str, Any]] = {
                    "one process": {"devices": "cpu,cpu", "n_threads": 2},
                    "two processes": {"devices": f"cpu,cpu@{address}", "n_threads": 1, "wire": flags.wire},
                }
                work = [Workload(flags.tokens, is_prompt=False)]
                rates: dict[str, list[float]] = {name: [] for name in crews}
                common = {"n_ctx": 256, "n_parallel": 1, "secret_file": flags.secret_file}
                for (
                    name,
                    crew,
                ) in crews.items():  # not at the same time: threads of both would share the cores
                    with LLM(path, split_mode=mode, **common, **crew) as llm:
                        for _ in range(flags.rounds):
                            rates[name].append(measure(llm, work, repetitions=1)[0].rate)
            found[mode] = {name: median(each) for name, each in rates.items()}
            best = {name: max(each) for name, each in rates.items()}
            found[mode]["ratio"] = found[mode]["two processes"] / found[mode]["one process"]
            found[mode]["best ratio"] = best["two processes"] / best["one process"]
    if flags.json:
        print(json.dumps(found))
        return
    for mode, figures in found.items():
        one, two = figures["one process"], figures["two processes"]
        print(
            f"{mode:<7} one process {one:7.1f} t/s   two {two:7.1f} t/s   "
            f"ratio {figures['ratio']:.2f} (of the best rounds {figures['best ratio']:.2f})"
        )


if __name__ == "__main__":
    main()
