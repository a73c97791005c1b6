"""What the steps of an engine take, and whether kernels are still being compiled."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a benchmark may time the import
    from motley.engine import Engine


def watch_steps(engine: Engine) -> list[tuple[int, int, float]]:
    """A list that each later step of the engine extends: tokens computed, tokens chosen, seconds.

    A call that computes several steps (`motley.engine.steady`) counts as these, of equal length.
    """
    steps: list[tuple[int, int, float]] = []
    compute, step = engine._compute, engine.step
    latest = (0, 0)
    n_rounds = 1

    def watched_compute(seconds: float) -> Any:
        nonlocal latest, n_rounds
        done = compute(seconds)
        latest = (done[0].n_tokens, len(done[1]))
        steady = engine._steady
        n_rounds = 1 if steady is None or steady.step is not done[0] else max(1, steady.n_computed)
        return done

    def watched_step(seconds: float = 0.0) -> None:
        started = time.perf_counter()
        step(seconds)
        took = time.perf_counter() - started
        steps.extend([(*latest, took / n_rounds)] * n_rounds)

    engine._compute, engine.step = watched_compute, watched_step  # type: ignore[method-assign]
    return steps


def wait_for_compilers(seconds: float) -> float:
    """Wait until no compile process of Motley is left on this machine: they go on after the process that started them,
    and take its successor's cores. Returns the seconds that it took, at most `seconds`.
    """
    started = time.monotonic()
    while _has_compilers() and time.monotonic() - started < seconds:
        time.sleep(0.1)
    return time.monotonic() - started


def _has_compilers() -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if b"compile_worker import main" in path.read_bytes():
                return True
    return False
