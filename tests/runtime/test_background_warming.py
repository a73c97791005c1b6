"""Kernels that loading does not wait for: in which order they are compiled, and what requests see of it."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest

from motley.engine.service import closed_error
from motley.errors import DeviceError
from motley.runtime.background_warming import BackgroundWarming
from motley.runtime.rehearsals import captured_ahead, rehearsals, tiers


class FakeWarmer:
    """Notes what it is told. Its second tier is compiled as soon as it is recorded."""

    def __init__(self, said: list[str], *, is_compiling: bool = True, error: Exception | None = None) -> None:
        self._said, self._error = said, error
        self.is_compiling = is_compiling
        self.max_rows: int | None = 1
        self.waiting = [1, 2, 3]

    def record_next(self, runner: Any) -> None:
        if self._error is not None:
            raise self._error
        self._said.append(f"record {self.waiting.pop(0)}")

    def advance(self, *, waits: bool) -> bool:
        if len(self.waiting) == 2:
            self.max_rows = 8
            return True
        if waits:
            self._said.append("wait")
            self.is_compiling, self.max_rows = False, None
        return waits

    def give_up(self, why: str) -> None:
        self._said.append(why)

    def hurry(self) -> None:
        self._said.append("hurry")


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
        set_limit=lambda max_rows: said.append(f"limit {max_rows}"),
    )
    background._pause = lambda seconds: said.append("pause")  # type: ignore[method-assign]
    return background


def test_an_idle_engine_compiles_one_tier_after_the_other() -> None:
    said: list[str] = []
    background = warming(FakeWarmer(said), said)
    background.run()
    assert said == ["pause", "record 1", "limit 8", "record 2", "record 3", "wait", "limit None"]
    background.wait()


def test_where_all_batches_are_recorded_there_is_no_pause() -> None:
    said: list[str] = []
    warmer = FakeWarmer(said)
    warmer.waiting.clear()
    warming(warmer, said).run()
    assert said == ["wait", "limit None"]


def test_waiting_for_all_kernels_lifts_the_limit_of_the_compiler() -> None:
    said: list[str] = []
    background = warming(FakeWarmer(said), said)
    thread = Thread(target=background.wait, daemon=True)
    background._is_compiled.wait = lambda timeout=None: True  # type: ignore[method-assign]
    thread.start()
    thread.join(60)
    assert said == ["hurry"]


def test_requests_get_a_pause_after_each_batch() -> None:
    said: list[str] = []
    warming(FakeWarmer(said), said, is_busy=lambda: True).run()
    assert said.count("pause") == 4
    assert [each for each in said if each != "pause"][-1] == "limit None"


def test_where_all_is_compiled_there_is_nothing_to_wait_for() -> None:
    said: list[str] = []
    background = warming(FakeWarmer(said, is_compiling=False), said)
    background.start()
    background.wait()
    assert not said


@pytest.mark.parametrize("error", [RuntimeError("no memory"), DeviceError("no memory")])
def test_a_failure_lifts_the_limit(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    background = warming(FakeWarmer(said, error=error), said)
    background.run()
    assert said == ["pause", "limit None", "no memory"]
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
    assert said == ["pause"]


@pytest.mark.parametrize(("n_batch", "n_parallel"), [(2048, 128), (512, 1), (16, 2), (4, 8), (1, 1)])
def test_tiers_are_all_batches_small_ones_first(n_batch: int, n_parallel: int) -> None:
    everything = list(rehearsals(n_batch, n_parallel))
    found = tiers(n_batch, n_parallel)
    shapes = [each for tier in found for each in tier.shapes]
    assert len(shapes) == len(everything)
    assert set(shapes) == set(everything)
    assert found[-1].max_rows is None
    for tier in found[:-1]:
        assert tier.max_rows is not None
        assert all(shape.n_tokens <= tier.max_rows for shape, _ in tier.shapes)
    assert [tier.shapes for tier in tiers(n_batch, n_parallel, is_one=True)] == [tuple(everything)]


def test_the_first_tier_is_one_row_and_the_second_a_few() -> None:
    assert [tier.max_rows for tier in tiers(2048, 1)] == [1, 8, None]


def test_decode_batches_are_captured_up_to_the_number_of_requests() -> None:
    assert captured_ahead(1) == []
    assert [shape.n_tokens for shape, _ in captured_ahead(5)] == [4, 4, 2, 2]
