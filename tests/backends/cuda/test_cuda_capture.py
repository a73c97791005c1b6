"""Capture on several GPUs, with a CUDA that only takes notes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from motley.backends.cuda import capture
from motley.backends.cuda.capture import Captured, GraphPool


@dataclass(frozen=True)
class FakeStream:
    device: torch.device


class FakeGraph:
    """Remembers the pool that it was captured into; its own is a new one."""

    def __init__(self) -> None:
        self.n_replays = 0
        self.captured_into: Any = None

    def pool(self) -> tuple[str, int]:
        return "pool", id(self)

    def replay(self) -> None:
        self.n_replays += 1


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, torch.device, bool]]:
    """Of each capture: its pool, its stream's GPU, and whether another one could have begun meanwhile."""
    notes: list[tuple[Any, torch.device, bool]] = []

    @contextmanager
    def graph(
        graph: FakeGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        graph.captured_into = pool
        yield
        is_free = capture._capturing.acquire(blocking=False)
        notes.append((pool, stream.device, is_free))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None: zeros(*size))
    return notes


def test_each_gpu_captures_on_a_stream_of_its_own_into_its_own_pool(
    captures: list[tuple[Any, torch.device, bool]],
) -> None:
    gpus = [torch.device("cuda", index) for index in range(2)]
    pools = [GraphPool(gpu) for gpu in gpus]
    for _ in range(2):
        for pool in pools:
            pool.capture(lambda: None)
    assert [gpu for _, gpu, _ in captures] == [gpus[0], gpus[0], gpus[1], gpus[1], *gpus]  # keepers first
    handles = [[handle for handle, gpu, _ in captures if gpu == own] for own in gpus]
    assert [own[0] for own in handles] == [None, None]
    assert [len(set(own[1:])) for own in handles] == [1, 1]
    assert handles[0][1] != handles[1][1]


def test_one_capture_at_a_time_in_the_process(captures: list[tuple[Any, torch.device, bool]]) -> None:
    GraphPool(torch.device("cuda:0")).capture(lambda: None)
    assert not any(could_begin for _, _, could_begin in captures)
    assert not capture._capturing.locked()


def test_a_capture_that_fails_lets_the_next_one_begin(captures: list[tuple[Any, torch.device, bool]]) -> None:
    pool = GraphPool(torch.device("cuda:0"))

    def fail() -> None:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        pool.capture(fail)
    pool.capture(lambda: None)
    assert len(captures) == 2  # the keeper's and the last


def test_what_is_captured_runs_once_and_again_in_each_replay(
    captures: list[tuple[Any, torch.device, bool]],
) -> None:
    done: list[str] = []

    def between() -> Any:
        done.append("met")
        return lambda: done.append("met again")

    captured = Captured([(lambda: done.append("captured"), between)], GraphPool(torch.device("cuda:0")))
    captured.replay()
    assert done == ["captured", "met", "met again"]
