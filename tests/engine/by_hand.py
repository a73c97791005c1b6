"""An engine that takes its steps only when a test says so: what a running request looks like is then no race."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import PropertyMock, patch

from motley import LLM
from motley.engine.engine import Engine


@contextmanager
def stepped_by_hand(llm: LLM) -> Iterator[Callable[[int], None]]:
    """Within this context the engine still handles messages, but only `step(n)` computes."""
    engine = llm._loaded.engine
    llm._call(engine.idle_tasks.clear)  # tests may drive the engine from their own thread

    def step(n: int) -> None:
        for _ in range(n):
            llm._call(engine.step)

    with patch.object(Engine, "can_step", new_callable=PropertyMock, return_value=False):
        yield step
    if llm._service.is_open:
        llm._call(lambda: None)  # wakes the engine's thread: it goes on by itself
