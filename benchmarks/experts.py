"""Fewer or more experts for each token: decode speed with random weights, in turn, as ratios to the file's number.

    python -m benchmarks experts --shape qwen3-30b-a3b --layers 16 --experts 4
    python -m benchmarks experts --shape glm-4.5-air --layers 3 --experts 4,2
    python -m benchmarks experts --device cuda:0,cpu --cpu-moe --threads 15 --experts 4

A round measures every number once; every other round begins with the last one. "bytes say": the ratio of the bytes that
a token reads. The file of weights is made once (XDG_CACHE_HOME).
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

from motley import LLM
from motley.bench import SHAPES, random_model_path, write_random_model

_ALL_LAYERS = 2**20


def main() -> None:
    flags = _flags()
    path = random_model_path(flags.shape, flags.weights, flags.layers)
    if not path.exists():
        write_random_model(path, flags.shape, flags.weights, n_layers=flags.layers)
    with LLM(
        path,
        devices=flags.device,
        n_threads=flags.threads,
        n_cpu_moe=_ALL_LAYERS if flags.cpu_moe else None,
        n_ctx=256,
        n_parallel=1,
        prefix_cache=False,
        spec="off",
    ) as llm:
        llm.finish_compiling()
        own = llm.n_expert_used
        numbers = list(dict.fromkeys([own, *(int(n) for n in flags.experts.split(","))]))
        n_bytes = {n: llm.token_bytes(flags.tokens / 2, n_expert_used=n) for n in numbers}
        rates = measure(llm, numbers, flags.tokens, flags.rounds)
    ratios = {n: sorted(a / b for a, b in zip(rates[n], rates[own], strict=True)) for n in numbers}
    if flags.json:
        settings = {name: value for name, value in vars(flags).items() if name != "json"}
        print(json.dumps({**settings, "rates": rates, "ratios": ratios, "bytes_per_token": n_bytes}))
        return
    for n in numbers:
        print(
            f"{n:4d} experts {median(rates[n]):8.2f} tokens/s   ratio {median(ratios[n]):.2f} "
            f"({ratios[n][0]:.2f} to {ratios[n][-1]:.2f})   bytes say {n_bytes[own] / n_bytes[n]:.2f}"
        )


def measure(llm: LLM, numbers: list[int], n_tokens: int, n_rounds: int) -> dict[int, list[float]]:
    """Tokens per second for each number of experts, a list over the rounds. An untimed round makes plans."""
    rates: dict[int, list[float]] = {n: [] for n in numbers}
    for number in range(1 + n_rounds):
        for n in reversed(numbers) if number % 2 else numbers:
            with llm.raw_sequence(n_expert_used=n) as sequence:
                started = time.perf_counter()
                sequence.follow(1, n_tokens)
                seconds = time.perf_counter() - started
            if number:
                rates[n].append(n_tokens / seconds)
    return rates


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = [name for name, shape in SHAPES.items() if shape.experts is not None]
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=shapes)
    parser.add_argument("--layers", type=int, help="only the first layers of the shape")
    parser.add_argument("--weights", default="Q4_K")
    parser.add_argument("--experts", default="4", help="numbers of experts besides the file's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cpu-moe", action="store_true", help="all experts on the second device")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
