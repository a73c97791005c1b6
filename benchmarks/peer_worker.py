"""What the workers of `peers` have in common: one engine in a process of its own, asked over its standard input."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Protocol


class Worker(Protocol):
    """One engine with one model and one cache type."""

    def begin(self, depth: int) -> None:
        """Start a context anew that goes on as if it held `depth` tokens."""
        ...

    def feed(self, tokens: list[int]) -> None:
        """One pass of these tokens, until the last one's logits are there."""
        ...


def some_tokens(n_tokens: int) -> list[int]:
    return [i % 256 for i in range(n_tokens)]  # every vocabulary has as many


def serve(make: Callable[..., Worker]) -> None:
    """Load with the options of the command line; then answer each line of input with a line of seconds."""
    started = time.perf_counter()
    worker = make(**json.loads(sys.argv[1]))
    print(json.dumps({"load": time.perf_counter() - started}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        worker.begin(request["depth"])
        tokens = some_tokens(request["n_tokens"])
        seconds = []
        for _ in range(request["times"]):
            started = time.perf_counter()
            worker.feed(tokens)
            seconds.append(time.perf_counter() - started)
        print(json.dumps({"seconds": seconds}), flush=True)
