"""From the start of a process to the first token: Motley and llama.cpp alternately, with their peak memory.

Each turn is a separate process: it imports, loads, and computes one prompt. The first round is a warm-up and not
counted, so that files are in the page cache and Python modules are compiled.

    python -m benchmarks first_token --python build/peers/bin/python --shape llama-1b --weights Q8_0,Q4_0,Q4_K

A virtual machine may have returned free memory to its host. Getting it back is as slow as reading a disk, which slows
down an engine that copies weights. `--touch-first 2000` uses and frees that many MiB right before each turn of either
engine, which gives the conditions of a physical machine.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peer_amx import amx_is_broken
from benchmarks.peers import FOLDER, Engine, Workload
from motley.bench import SHAPES, write_random_model


@dataclass(frozen=True)
class Turn:
    """One process: seconds of its stages, and its peak resident bytes."""

    total: float  # from the start of the process to the first token
    load: float
    prompt: float
    peak: int

    @property
    def from_load(self) -> float:
        return self.load + self.prompt


def take_turn(name: str, command: Sequence[str], options: dict[str, Any], n_prompt: int) -> Turn:
    with tempfile.TemporaryFile("w+") as log:
        started = time.perf_counter()
        engine = Engine(name, command, options, log)
        prompt = n_prompt / engine.rate(Workload("prompt", n_prompt, 1, 0))
        total, peak = time.perf_counter() - started, engine.peak_bytes()
        engine.close()
    return Turn(total, engine.seconds_to_load, prompt, peak)


def touch(n_bytes: int) -> None:
    """Write to `n_bytes` of memory and free it."""
    if n_bytes:
        memory = mmap.mmap(-1, n_bytes)
        for position in range(0, n_bytes, mmap.PAGESIZE):
            memory[position] = 1
        memory.close()


def show(name: str, turns: dict[str, list[Turn]]) -> str:
    """A table as Markdown: medians, and the ratio of each round's turns."""
    lines = [
        f"| {name} | start to first token | load to first token | load | prompt | peak MiB |",
        "|---|---|---|---|---|---|",
    ]
    for engine, own in turns.items():
        cells = [
            f"{median(getattr(t, key) for t in own):.2f} s"
            for key in ("total", "from_load", "load", "prompt")
        ]
        lines.append(f"| {engine} | {' | '.join(cells)} | {max(t.peak for t in own) >> 20} |")
    pairs = list(zip(*turns.values(), strict=True))
    cells = []
    for key in ("total", "from_load", "load", "prompt", "peak"):
        ratios = sorted(getattr(ours, key) / getattr(theirs, key) for ours, theirs in pairs)
        cells.append(f"{median(ratios):.2f} ({ratios[0]:.2f} … {ratios[-1]:.2f})")
    return "\n".join([*lines, f"| ratio | {' | '.join(cells)} |"])


def compare(args: argparse.Namespace, path: Path, n_prompt: int) -> dict[str, list[Turn]]:
    options = {"model": str(path), "n_threads": args.threads, "n_ctx": n_prompt + 512, "cache_type": "f16"}
    engines = {
        "motley": ([sys.executable, str(FOLDER / "peer_motley.py")], options),
        "llama.cpp": ([args.python, str(FOLDER / "peer_llama_cpp.py")], options | {"flash": True}),
    }
    turns: dict[str, list[Turn]] = {name: [] for name in engines}
    for i in range(args.rounds + 1):
        for name in engines if i % 2 == 0 else reversed(engines):
            touch(args.touch_first << 20)
            turn = take_turn(name, *engines[name], n_prompt)
            if i:
                turns[name].append(turn)
    return turns


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="interpreter that has llama-cpp-python")
    parser.add_argument("--shape", default="llama-160m", choices=SHAPES)
    parser.add_argument("--weights", default="Q8_0,Q4_0,Q4_K", help="formats, by comma")
    parser.add_argument("--model", type=Path, help="a GGUF file instead of random weights")
    parser.add_argument("--prompts", default="8,512", help="lengths, by comma")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--touch-first", type=int, default=0, metavar="MIB", help="memory to use and free")
    parser.add_argument("--json", type=Path, help="write every turn's figures there")
    args = parser.parse_args()
    amx_is_broken()  # takes seconds; the result is cached
    with tempfile.TemporaryDirectory() as compiled:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = compiled  # the same empty cache for both engines
        run(args)


def run(args: argparse.Namespace) -> None:
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    print(f"Medians of {args.rounds} rounds, {args.threads} threads; ratios by round (range in brackets).\n")
    for weights in [""] if args.model else args.weights.split(","):
        with tempfile.TemporaryDirectory() as folder:
            path = args.model or Path(folder) / "model.gguf"
            if not args.model:
                write_random_model(path, args.shape, weights)
            for n_prompt in map(int, args.prompts.split(",")):
                name = f"{args.model.stem if args.model else f'{args.shape} {weights}'}, prompt {n_prompt}"
                turns = compare(args, path, n_prompt)
                print(show(name, turns), end="\n\n", flush=True)
                found[name] = {engine: [asdict(turn) for turn in own] for engine, own in turns.items()}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
