"""Common code of the workers of `peers`: one engine in a separate process, controlled over its standard input."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Protocol


class Worker(Protocol):
    """One engine with one model and one cache type."""

    about: str  # the engine's description of its kernels

    def begin(self, depth: int) -> None:
        """Start a new context that continues after `depth` tokens."""
        ...

    def feed(self, tokens: list[int]) -> None:
        """Run one pass over these tokens; returns when the last token's logits are available."""
        ...


def some_tokens(n_tokens: int) -> list[int]:
    return [i % 256 for i in range(n_tokens)]  # every vocabulary has at least 256 tokens


def serve(make: Callable[..., Worker]) -> None:
    """Load with the options of the command line; then answer each line of input with a line of seconds."""
    started = time.perf_counter()
    worker = make(**json.loads(sys.argv[1]))
    print(json.dumps({"load": time.perf_counter() - started, "about": worker.about}), flush=True)
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
