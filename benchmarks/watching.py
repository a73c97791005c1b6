"""What the steps of an engine take."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a benchmark may time the import
    from motley.engine import Engine


def watch_steps(engine: Engine) -> list[tuple[int, int, float]]:
    """A list that each later step of the engine extends: tokens computed, tokens chosen, seconds."""
    steps: list[tuple[int, int, float]] = []
    compute, step = engine._compute, engine.step
    latest = (0, 0)

    def watched_compute(seconds: float) -> Any:
        nonlocal latest
        done = compute(seconds)
        latest = (done[0].n_tokens, len(done[1]))
        return done

    def watched_step(seconds: float = 0.0) -> None:
        started = time.perf_counter()
        step(seconds)
        steps.append((*latest, time.perf_counter() - started))

    engine._compute, engine.step = watched_compute, watched_step  # type: ignore[method-assign]
    return steps
