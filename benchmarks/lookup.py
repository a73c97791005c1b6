"""What the lookup drafter's index takes, in microseconds: making it, a step that indexes, a look-up.

    python -m benchmarks lookup --tokens 1000,16000,120000

A prompt's index is made when its request is made, in the caller's thread. A step adds the new tokens of the answer and
looks up; texts that are longer than what is indexed (remembered answers) are indexed a portion in each step. Before
each measured call other memory is read, as a step reads the weights: the processor's caches do not have the index.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from motley.backends import look_up, new_text_index

N_ANSWER = 200  # tokens, one in each step
N_ROUNDS = 5
N_VOCAB = 32000
OTHER = np.ones(1 << 24, np.float32)  # 64 MiB


def microseconds(call: Callable[[], object]) -> float:
    float(OTHER.sum())
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e6


def text_of(n_tokens: int) -> list[int]:
    """Half of it are passages that occurred before."""
    rng = random.Random(1)
    text: list[int] = []
    while len(text) < n_tokens:
        start = rng.randrange(len(text) + 1)
        text += text[start : start + 40] + [rng.randrange(N_VOCAB) for _ in range(40)]
    return text[:n_tokens]


def row_of(n_tokens: int) -> str:
    text = text_of(n_tokens + N_ANSWER)
    prompt, rest = tuple(text[:n_tokens]), text[n_tokens:]
    made, indexed, portions, steps = [], [], [], []
    for _ in range(N_ROUNDS):
        made.append(microseconds(lambda: new_text_index(prompt)))
        index, waiting = new_text_index(prompt), new_text_index(prompt)
        indexed.append(microseconds(lambda index=index: index.index(index.n_left)))  # type: ignore[misc]
        portions.append(_portions(waiting))
        steps.append([_step(index, rest[: n + 1]) for n in range(len(rest))])
    # The same step of all rounds: what interrupts one of them does not count.
    each_portion, each_step = (
        [min(same) for same in zip(*rounds, strict=True)] for rounds in (portions, steps)
    )
    return (
        f"| {n_tokens:,} | {min(made):.0f} | {min(indexed):.0f} | {median(each_portion):.0f} / {max(each_portion):.0f} "
        f"| {median(each_step):.1f} / {max(each_step):.1f} |"
    )


def _portions(index: Any) -> list[float]:
    found = []
    while index.n_left:
        found.append(microseconds(lambda: look_up([index], [[]], 15)))
    return found


def _step(index: Any, answer: list[int]) -> float:
    return microseconds(lambda: look_up([index], [answer], 15))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="1000,16000,120000", help="of the prompts")
    numbers = [int(number) for number in parser.parse_args().tokens.split(",")]
    if new_text_index([1]) is None:
        raise SystemExit("the native core has no index of texts: build it first")
    print(
        "| tokens of the prompt | copy and table | index the prompt "
        "| step that indexes 512 tokens, median / max | step with one new token, median / max |\n"
        "|---|---|---|---|---|"
    )
    for n_tokens in numbers:
        print(row_of(n_tokens), flush=True)


if __name__ == "__main__":
    main()
