"""Motley beside llama.cpp and HF transformers: the same shapes, threads and cache types, turn by turn in one run.

The machine's mood changes over minutes, so only ratios within a round count: each round times every engine once, in one
order and then in the other, and the tables show medians over the rounds, with their range. Contexts of --depth tokens
hold random keys and values in every engine. llama.cpp comes from the PyPI package llama-cpp-python (`make bench-peers`
builds it); give the interpreter that has it:

    python -m benchmarks peers --python build/peers/bin/python --shape llama-1b --weights Q8_0,Q4_0,Q4_K
    python -m benchmarks peers --python build/peers/bin/python --shape llama-1b --weights Q4_0 \\
        --cache-types f16,q8_0,q4_0 --depth 8192
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

from benchmarks.peer_amx import WITHOUT_AMX, amx_is_broken
from motley.bench import SHAPES, environment, write_random_model
from motley.runtime.crew import make_crew

FOLDER = Path(__file__).parent
OURS = "motley"


class Engine:
    """A worker process of one engine."""

    def __init__(self, name: str, command: Sequence[str], options: dict[str, Any], log: IO[str]) -> None:
        self.name = name
        self._log = log
        self._process = subprocess.Popen(
            [*command, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | (WITHOUT_AMX if amx_is_broken() else {}),
        )
        self.seconds_to_load: float = self._answer()["load"]

    def rate(self, workload: Workload) -> float:
        """Tokens per second: the median of the workload's passes."""
        return workload.n_tokens / median(self._time(workload.n_tokens, workload.times, workload.depth))

    def warm_up(self, workload: Workload) -> None:
        """Plans and page faults of that size of pass; at no depth, where a prompt takes seconds and not minutes."""
        self._time(workload.n_tokens, 1, 0)

    def peak_bytes(self) -> int:
        """The most memory that was resident, as the system counts it."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024

    def close(self) -> None:
        self._process.communicate()

    def _time(self, n_tokens: int, times: int, depth: int) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"n_tokens": n_tokens, "times": times, "depth": depth}) + "\n")
        self._process.stdin.flush()
        seconds: list[float] = self._answer()["seconds"]
        return seconds

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            raise SystemExit(f"{self._log.read()[-2000:]}\n{self.name}: the worker ended (status {status})")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(frozen=True)
class Workload:
    """`times` passes of `n_tokens`, after `depth` tokens of context."""

    name: str
    n_tokens: int
    times: int
    depth: int


@dataclass(frozen=True)
class Comparison:
    """Tokens per second of one workload, by engine, of each round."""

    model: str
    workload: Workload
    rates: dict[str, list[float]]

    def ratios(self, engine: str, other: str) -> list[float]:
        return sorted(a / b for a, b in zip(self.rates[engine], self.rates[other], strict=True))

    def table(self) -> str:
        """As Markdown: a line for each engine, and how many times as fast each of ours is."""
        ours = [name for name in self.rates if name.startswith(OURS)]
        lines = [
            f"| {self.model}, {self.workload.name} | tokens/s | {' | '.join(f'{name}: ×' for name in ours)} |",
            f"|---|{'---|' * (len(ours) + 1)}",
        ]
        for other, rates in self.rates.items():
            cells = [
                "" if name == other else f"**{median(found):.2f}** ({found[0]:.2f} … {found[-1]:.2f})"
                for name, found in ((name, self.ratios(name, other)) for name in ours)
            ]
            lines.append(f"| {other} | {median(rates):.4g} | {' | '.join(cells)} |")
        return "\n".join(lines)


def compare(engines: Sequence[Engine], model: str, workload: Workload, n_rounds: int) -> Comparison:
    rates: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for engine in engines:
        engine.warm_up(workload)
    for i in range(n_rounds):
        for engine in engines if i % 2 == 0 else reversed(engines):  # a drift cancels out
            rates[engine.name].append(engine.rate(workload))
    return Comparison(model, workload, rates)


@contextmanager
def started(args: argparse.Namespace, model: Path) -> Iterator[list[Engine]]:
    """All engines that the arguments ask for, loaded one after the other."""
    with ExitStack() as stack:
        engines: list[Engine] = []

        def start(name: str, python: str, script: str, **options: Any) -> None:
            command = [python, str(FOLDER / script)]
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            engines.append(Engine(name, command, options | {"n_threads": args.threads}, log))
            stack.callback(engines[-1].close)

        shared = {"model": str(model), "n_ctx": args.depth + args.n_prompt + args.n_gen}
        cache_types = args.cache_types.split(",")
        for kind in cache_types:
            start(f"{OURS} {kind}", sys.executable, "peer_motley.py", cache_type=kind, **shared)
        ways = [(kind, kind, True) for kind in cache_types]
        if "f16" in cache_types:  # without flash attention V cannot be quantized
            ways.append(("f16 -fa 0", "f16", False))
        for name, kind, flash in ways:
            options = shared | {"cache_type": kind, "flash": flash}
            start(f"llama.cpp {name}", args.python, "peer_llama_cpp.py", **options)
        for dtype in filter(None, [] if args.model else args.transformers.split(",")):
            options = {"config": transformers_config(args.shape), "dtype": dtype}
            start(f"transformers {dtype}", sys.executable, "peer_transformers.py", **options)
        yield engines


def transformers_config(shape_name: str) -> dict[str, Any]:
    """That shape in the words of LlamaConfig."""
    shape = SHAPES[shape_name]
    return {
        "num_hidden_layers": shape.n_layers,
        "hidden_size": shape.n_embd,
        "intermediate_size": shape.n_ff,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.n_vocab,
        "max_position_embeddings": shape.n_ctx,
    }


def run(args: argparse.Namespace, model: Path, name: str) -> Iterator[Comparison]:
    """Compare on one file, printing as it goes."""
    sizes = {"prompt": (args.n_prompt, 1), "decode": (1, args.n_gen)}
    suffix = f" at {args.depth}" if args.depth else ""
    with started(args, model) as engines:
        for test in args.tests.split(","):
            n_tokens, times = sizes[test]
            workload = Workload(f"{test} {n_tokens * times}{suffix}", n_tokens, times, args.depth)
            comparison = compare(engines, name, workload, args.rounds)
            print(comparison.table(), end="\n\n", flush=True)
            yield comparison
        if not args.depth:  # workers keep copies of what they fill a deep context with
            for engine in engines:
                peak = engine.peak_bytes() >> 20
                print(f"- {engine.name}: load {engine.seconds_to_load:.2f} s, peak resident {peak} MiB")
            print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="interpreter that has llama-cpp-python")
    parser.add_argument("--shape", default="llama-160m", choices=SHAPES)
    parser.add_argument("--weights", default="Q8_0,Q4_0,Q4_K", help="formats, by comma")
    parser.add_argument("--model", type=Path, help="a GGUF file instead of random weights")
    parser.add_argument("--cache-types", default="f16", help="by comma")
    parser.add_argument(
        "--transformers", default="float32,bfloat16", help="dtypes, by comma; '' for none (none with --model)"
    )
    parser.add_argument("--tests", default="prompt,decode", help="by comma")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--n-prompt", type=int, default=512)
    parser.add_argument("--n-gen", type=int, default=16)
    parser.add_argument("--depth", type=int, default=0, help="tokens of context before that")
    parser.add_argument("--json", type=Path, help="write every round's figures there")
    args = parser.parse_args()
    found: list[Comparison] = []
    load = os.getloadavg()[0]  # engines that share their cores with others cannot be compared
    print(
        f"Tokens/s and ratios: medians of {args.rounds} rounds, {args.threads} threads (range in brackets). "
        f"Load average before: {load:.2f}\n"
    )
    for weights in [""] if args.model else args.weights.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path, name = args.model, args.model and args.model.stem
            if path is None:
                path, name = Path(folder) / "model.gguf", f"{args.shape} {weights}"
                write_random_model(path, args.shape, weights)
            found += run(args, path, name)
    if args.json:
        head = {**environment(make_crew("cpu")), "n_threads": args.threads, "load_average": load}
        figures = {"comparisons": [asdict(comparison) for comparison in found]}
        args.json.write_text(json.dumps(head | figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
