"""Kernels that loading does not wait for: in which order they are compiled, and what requests see of it."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest

from motley.engine.service import closed_error
from motley.models import BatchShape
from motley.runtime.background_warming import BackgroundWarming
from motley.runtime.rehearsals import FIRST_ROWS, captured_ahead, first_rehearsals, rehearsals


class FakeWarmer:
    """Notes what it is told."""

    def __init__(self, said: list[str], *, is_limited: bool = True, fails: bool = False) -> None:
        self._said, self._fails = said, fails
        self.max_rows = FIRST_ROWS if is_limited else None
        self.waiting = [1, 2] if is_limited else []

    def record_next(self, runner: Any) -> None:
        if self._fails:
            raise RuntimeError("no memory")
        self._said.append(f"record {self.waiting.pop(0)}")

    def finish(self) -> None:
        self._said.append("compiled")

    def stop_compiling(self) -> None:
        self._said.append("stop")


def warming(
    warmer: FakeWarmer,
    said: list[str],
    *,
    is_busy: Callable[[], bool] = lambda: False,
    call: Callable[[Callable[[], None]], None] = lambda work: work(),
) -> BackgroundWarming:
    background = BackgroundWarming(
        warmer,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        call=call,
        is_busy=is_busy,
        lift_limit=lambda: said.append("lift"),
    )
    background._pause = lambda seconds: said.append("pause")  # type: ignore[method-assign]
    return background


def test_an_idle_engine_compiles_and_lifts_the_limit() -> None:
    said: list[str] = []
    background = warming(FakeWarmer(said), said)
    background.run()
    assert said == ["pause", "record 1", "record 2", "compiled", "stop", "lift"]
    background.wait()


def test_requests_get_a_pause_after_each_batch() -> None:
    said: list[str] = []
    warming(FakeWarmer(said), said, is_busy=lambda: True).run()
    assert said == ["pause", "record 1", "pause", "record 2", "pause", "compiled", "stop", "lift"]


def test_without_a_limit_nothing_is_compiled() -> None:
    said: list[str] = []
    background = warming(FakeWarmer(said, is_limited=False), said)
    background.start()
    background.wait()
    assert not said


def test_a_failure_lifts_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    background = warming(FakeWarmer(said, fails=True), said)
    background.run()
    assert said == ["pause", "stop", "lift"]
    assert "not compiled ahead" in caplog.text
    background.wait()


def test_the_end_of_the_model_ends_it_and_those_who_wait() -> None:
    said: list[str] = []

    def call(work: Callable[[], None]) -> None:
        raise closed_error()

    background = warming(FakeWarmer(said), said, call=call)
    waiter = Thread(target=background.wait, daemon=True)
    waiter.start()
    background.run()
    waiter.join(60)
    assert not waiter.is_alive()
    assert "lift" not in said


@pytest.mark.parametrize(("n_batch", "n_parallel"), [(2048, 128), (512, 1), (4, 8), (1, 1)])
def test_the_first_batches_are_some_of_all(n_batch: int, n_parallel: int) -> None:
    everything, first = list(rehearsals(n_batch, n_parallel)), list(first_rehearsals(n_batch, n_parallel))
    assert set(first) <= set(everything)
    assert (BatchShape(1, 1), 1) in first
    assert all(shape.n_tokens <= min(FIRST_ROWS, n_batch) for shape, _ in first)


def test_decode_batches_are_captured_up_to_the_number_of_requests() -> None:
    assert captured_ahead(1) == []
    assert [shape.n_tokens for shape, _ in captured_ahead(5)] == [2, 2, 4, 4]
