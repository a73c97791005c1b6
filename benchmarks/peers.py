"""Motley, llama.cpp and HF transformers: the same shapes, threads and cache types, alternating in one run.

The machine's speed changes over minutes, so only ratios within a round count: each round times every engine once, in
alternating order, and the tables show medians over the rounds, with their range. Contexts of --depth tokens
hold random keys and values in every engine. llama.cpp comes from the PyPI package llama-cpp-python (`make bench-peers`
builds it); give the interpreter that has it:

    python -m benchmarks peers --python build/peers/bin/python --shape llama-1b --weights Q8_0,Q4_0,Q4_K
    python -m benchmarks peers --python build/peers/bin/python --shape llama-1b --weights Q4_0 \\
        --cache-types f16,q8_0,q4_0 --depth 8192
    python -m benchmarks peers --python build/peers/bin/python --shape qwen3-30b-a3b --layers 8 --weights Q4_K

The speed of memory is measured before and after each round: where it changes by more than a third between rounds, the
ratios of slow and fast rounds are shown by themselves.

--isa compares kernels of one instruction set: Motley is told to use those, and llama.cpp must be built for them
(`make bench-peers ISA=avx2` does both).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

from benchmarks.memory_probe import MemoryProbe
from benchmarks.peer_amx import WITHOUT_AMX, amx_is_broken
from motley.bench import SHAPES, environment, write_random_model
from motley.runtime.crew import make_crew

FOLDER = Path(__file__).parent
OURS = "motley"
_PAUSE = 0.1  # seconds before each turn: an engine's threads wait in loops for a while after theirs, and take cores


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
        answer = self._answer()
        self.seconds_to_load: float = answer["load"]
        self.about: str = answer["about"]  # the engine's description of its kernels

    def rate(self, workload: Workload) -> float:
        """Tokens per second: the median of the workload's passes."""
        return workload.n_tokens / median(self._time(workload.n_tokens, workload.times, workload.depth))

    def warm_up(self, workload: Workload) -> None:
        """Run the workload once, for plans and page faults. At depth 0, where a prompt takes seconds, not minutes."""
        self._time(workload.n_tokens, 1, 0)

    def peak_bytes(self) -> int:
        """The process's peak resident memory, as reported by the system."""
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
    """Tokens per second of one workload in each round, by engine."""

    model: str
    workload: Workload
    rates: dict[str, list[float]]
    memory: list[float]  # bytes per second, before each round and after the last

    def ratios(self, engine: str, other: str) -> list[float]:
        return sorted(a / b for a, b in zip(self.rates[engine], self.rates[other], strict=True))

    def by_memory(self) -> str:
        """The speed of memory, and the ratios in its slow and fast rounds. Rounds in which it changed are left out."""
        slowest, fastest = min(self.memory), max(self.memory)
        text = f"- memory: {median(self.memory) / 1e9:.1f} GB/s ({slowest / 1e9:.1f} … {fastest / 1e9:.1f})\n"
        middle = (slowest * fastest) ** 0.5
        around = list(zip(self.memory, self.memory[1:], strict=False))
        slow = [i for i, pair in enumerate(around) if max(pair) < middle]
        fast = [i for i, pair in enumerate(around) if min(pair) >= middle]
        if fastest < 4 / 3 * slowest:
            return text
        ours, *_ = self.rates
        for what, rounds in (("below", slow), ("above", fast)):
            for other in self.rates if rounds else ():
                if other.startswith(OURS):
                    continue
                pairs = [(self.rates[ours][i], self.rates[other][i]) for i in rounds]
                mine, theirs = (median(column) for column in zip(*pairs, strict=True))
                found = sorted(a / b for a, b in pairs)
                text += (
                    f"- memory {what} {middle / 1e9:.0f} GB/s, {len(rounds)} rounds: {ours} {mine:.1f}, {other} "
                    f"{theirs:.1f}, **{median(found):.2f}** ({found[0]:.2f} … {found[-1]:.2f})\n"
                )
        return text

    def table(self) -> str:
        """A Markdown table: a line for each engine, and the speed ratios of Motley's engines to the others."""
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


def compare(
    engines: Sequence[Engine],
    model: str,
    workload: Workload,
    n_rounds: int,
    probe: MemoryProbe,
) -> Comparison:
    rates: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for engine in engines:
        engine.warm_up(workload)
    memory = [probe.bytes_per_second()]
    for i in range(n_rounds):
        for engine in engines if i % 2 == 0 else reversed(engines):  # alternating order cancels a drift
            time.sleep(_PAUSE)
            rates[engine.name].append(engine.rate(workload))
        time.sleep(_PAUSE)
        memory.append(probe.bytes_per_second())
    return Comparison(model, workload, rates, memory)


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
        if args.isa:
            os.environ["MOTLEY_INSTRUCTION_SET"] = args.isa
        for kind in cache_types:
            start(f"{OURS} {kind}", sys.executable, "peer_motley.py", cache_type=kind, **shared)
        ways = [(kind, kind, True) for kind in cache_types]
        if "f16" in cache_types and not args.only_flash:  # without flash attention V must be f16
            ways.append(("f16 -fa 0", "f16", False))
        for name, kind, flash in ways:
            options = shared | {"cache_type": kind, "flash": flash}
            start(f"llama.cpp {name}", args.python, "peer_llama_cpp.py", **options)
            require_set(args.isa, engines[-1].about)
        is_llama = not args.model and SHAPES[args.shape].architecture == "llama"
        for dtype in filter(None, args.transformers.split(",") if is_llama else []):
            options = {"config": transformers_config(args.shape, args.layers), "dtype": dtype}
            start(f"transformers {dtype}", sys.executable, "peer_transformers.py", **options)
        yield engines


# What llama.cpp says of a build for an instruction set, and what it must not say: wider instructions.
_BUILDS = {
    "avx2": ("AVX2 = 1", ("AVX_VNNI = 1", "AVX512 = 1")),
    "avx_vnni": ("AVX_VNNI = 1", ("AVX512 = 1",)),
    "avx512": ("AVX512 = 1", ("AVX512_VNNI = 1",)),
}


def require_set(isa: str, about: str) -> None:
    """Ends the program if llama.cpp was built for other instructions than `isa` ("": any)."""
    if isa not in _BUILDS:
        return
    needed, wider = _BUILDS[isa]
    hint = f"`make bench-peers ISA={isa}` builds one for {isa}"
    if found := [name for name in wider if name in about]:
        raise SystemExit(
            f"llama.cpp was built with {found[0].partition(' ')[0]}, which {isa} does not have; {hint}"
        )
    if needed not in about:
        raise SystemExit(f"llama.cpp was built without {needed.partition(' ')[0]}; {hint}")


def transformers_config(shape_name: str, n_layers: int | None = None) -> dict[str, Any]:
    """The shape as arguments of LlamaConfig."""
    shape = SHAPES[shape_name]
    return {
        "num_hidden_layers": n_layers or shape.n_layers,
        "hidden_size": shape.n_embd,
        "intermediate_size": shape.n_ff,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.n_vocab,
        "max_position_embeddings": shape.n_ctx,
    }


def run(args: argparse.Namespace, model: Path, name: str) -> Iterator[Comparison]:
    """Compare the engines on one model file; prints each result at once."""
    sizes = {"prompt": (args.n_prompt, 1), "decode": (1, args.n_gen)}
    suffix = f" at {args.depth}" if args.depth else ""
    with started(args, model) as engines:
        for test in args.tests.split(","):
            n_tokens, times = sizes[test]
            workload = Workload(f"{test} {n_tokens * times}{suffix}", n_tokens, times, args.depth)
            comparison = compare(engines, name, workload, args.rounds, MemoryProbe(args.threads))
            print(f"{comparison.table()}\n\n{comparison.by_memory()}", flush=True)
            yield comparison
        if not args.depth:  # workers keep copies of the data for deep contexts
            for engine in engines:
                peak = engine.peak_bytes() >> 20
                print(f"- {engine.name}: load {engine.seconds_to_load:.2f} s, peak resident {peak} MiB")
            print(flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="interpreter that has llama-cpp-python")
    parser.add_argument(
        "--isa", default="", help="instruction set to compare kernels of. Default: each engine's best"
    )
    parser.add_argument("--shape", default="llama-160m", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="only the first N layers. Default: all")
    parser.add_argument("--weights", default="Q8_0,Q4_0,Q4_K", help="formats, by comma")
    parser.add_argument("--model", type=Path, help="a GGUF file instead of random weights")
    parser.add_argument("--cache-types", default="f16", help="by comma")
    parser.add_argument(
        "--transformers",
        default="float32,bfloat16",
        help="dtypes, by comma; '' for none (none with --model, and for llama shapes only)",
    )
    parser.add_argument(
        "--only-flash",
        action="store_true",
        help="leave llama.cpp without flash attention out: one copy of the weights less in memory",
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
    head = {**environment(make_crew("cpu")), "n_threads": args.threads, "isa": args.isa}
    load = os.getloadavg()[0]  # other programs on the same cores make the comparison invalid
    print(
        f"{head['hardware']}{f', {args.isa} kernels' if args.isa else ''}. Tokens/s and ratios: medians of "
        f"{args.rounds} rounds, {args.threads} threads (range in brackets). "
        f"Load average before: {load:.2f}\n"
    )
    for weights in [""] if args.model else args.weights.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path, name = args.model, args.model and args.model.stem
            if path is None:
                path, name = Path(folder) / "model.gguf", f"{args.shape} {weights}"
                name += f", {args.layers} layers" if args.layers else ""
                write_random_model(path, args.shape, weights, n_layers=args.layers)
            found += run(args, path, name)
    if args.json:
        figures = {"load_average": load, "comparisons": [asdict(comparison) for comparison in found]}
        args.json.write_text(json.dumps(head | figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
