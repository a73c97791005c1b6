"""Capture on several GPUs, with a CUDA that only takes notes and refuses what the real one refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from motley.backends.cuda import capture
from motley.backends.cuda.capture import Captured, CaptureError, GraphPool

_GIB = 2**30


@dataclass(frozen=True)
class FakeStream:
    device: torch.device


@dataclass
class FakeCuda:
    """What torch keeps of captures. As in torch 2.11, a capture that has become invalid is not ended by
    `capture_end`: the pool stays in the middle of a recording, and refuses the next one.
    """

    streams: list[FakeStream | None] = field(default_factory=lambda: [None])  # the current one is the last
    recording: list[Any] = field(default_factory=list)  # pools
    is_invalid: bool = False
    n_pools: int = 0
    notes: list[tuple[Any, torch.device, bool]] = field(default_factory=list)
    has_blas: bool = False
    n_free: int = _GIB
    n_cached: int = 0

    def new_pool(self) -> tuple[int, int]:
        self.n_pools += 1
        return 0, self.n_pools

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams.pop()

    def end_allocating(self, device: int, pool: Any) -> None:
        if pool not in self.recording:
            raise RuntimeError("not recording to mempool_id")
        self.recording.remove(pool)

    def use_blas(self) -> None:
        if self.recording and not self.has_blas:
            self.is_invalid = True
            raise RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")
        self.has_blas = True

    def free_cached(self) -> None:
        self.n_free, self.n_cached = self.n_free + self.n_cached, 0


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._pool: Any = None
        self.n_replays = 0

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        if pool in self._cuda.recording:
            raise RuntimeError("already recording to mempool_id")
        self._pool = pool
        self._cuda.recording.append(pool)

    def capture_end(self) -> None:
        if self._cuda.is_invalid or self._pool not in self._cuda.recording:
            self._cuda.is_invalid = False  # the stream no longer captures
            raise RuntimeError("operation failed due to a previous error during capture")
        self._cuda.recording.remove(self._pool)
        is_free = capture._capturing.acquire(blocking=False)
        stream = self._cuda.streams[-1]
        assert stream is not None
        self._cuda.notes.append((self._pool, stream.device, is_free))

    def pool(self) -> Any:
        return self._pool

    def replay(self) -> None:
        self.n_replays += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Its notes, of each capture that was ended: its pool, its stream's GPU, whether another one could have begun."""
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(fake))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", fake.new_pool)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", fake.use_blas)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (fake.n_free, 80 * _GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", fake.free_cached)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end_allocating, raising=False)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None: zeros(*size))
    return fake


def failing(cuda: FakeCuda, error: BaseException, *, breaks: bool) -> Callable[[], None]:
    def work() -> None:
        cuda.is_invalid = breaks
        raise error

    return work


def test_each_gpu_captures_on_a_stream_of_its_own_into_its_own_pool(
    cuda: FakeCuda,
) -> None:
    gpus = [torch.device("cuda", index) for index in range(2)]
    pools = [GraphPool(gpu) for gpu in gpus]
    for _ in range(2):
        for pool in pools:
            pool.capture(lambda: None)
    assert [gpu for _, gpu, _ in cuda.notes] == [gpus[0], gpus[0], gpus[1], gpus[1], *gpus]  # keepers first
    handles = [[handle for handle, gpu, _ in cuda.notes if gpu == own] for own in gpus]
    assert [len(set(own)) for own in handles] == [1, 1]
    assert handles[0][0] != handles[1][0]


def test_one_capture_at_a_time_in_the_process(cuda: FakeCuda) -> None:
    GraphPool(torch.device("cuda:0")).capture(lambda: None)
    assert not any(could_begin for _, _, could_begin in cuda.notes)
    assert not capture._capturing.locked()


@pytest.mark.parametrize("breaks", [False, True])
def test_a_capture_that_fails_says_why_and_the_next_one_is_made(cuda: FakeCuda, breaks: bool) -> None:
    pool = GraphPool(torch.device("cuda:0"))
    pool.capture(lambda: None)
    (first,) = {handle for handle, *_ in cuda.notes}
    reason = torch.OutOfMemoryError("no memory")
    with pytest.raises(CaptureError, match="no memory") as failure:
        pool.capture(failing(cuda, reason, breaks=breaks))
    assert failure.value.cause is reason
    assert not capture._capturing.locked()
    assert not cuda.recording
    assert cuda.streams == [None]  # the thread is back on its own stream
    pool.capture(lambda: None)
    (second,) = {handle for handle, *_ in cuda.notes[-1:]}
    assert (second != first) == breaks  # torch may still refer to the pool of a broken capture


def test_an_interrupted_capture_is_ended_and_the_interrupt_goes_on(cuda: FakeCuda) -> None:
    pool = GraphPool(torch.device("cuda:0"))
    with pytest.raises(KeyboardInterrupt):
        pool.capture(failing(cuda, KeyboardInterrupt(), breaks=True))
    assert not cuda.recording
    pool.capture(lambda: None)


def test_a_thread_uses_cublas_before_its_first_capture(cuda: FakeCuda) -> None:
    GraphPool(torch.device("cuda:0")).capture(cuda.use_blas)  # fails where it makes a handle
    assert cuda.has_blas
    assert not cuda.is_invalid


def test_room_for_a_capture_counts_what_torch_can_give_back(cuda: FakeCuda) -> None:
    pool = GraphPool(torch.device("cuda:0"))
    cuda.n_cached = 2 * _GIB
    assert pool.has_room(_GIB // 2)
    assert cuda.n_cached  # it was enough without
    assert pool.has_room(2 * _GIB)
    assert not cuda.n_cached
    assert not pool.has_room(3 * _GIB)
    cuda.n_free = 0
    assert pool.has_room(2 * _GIB)  # the pool has it by now


def test_what_is_captured_runs_once_and_again_in_each_replay(
    cuda: FakeCuda,
) -> None:
    done: list[str] = []

    def between() -> Any:
        done.append("met")
        return lambda: done.append("met again")

    captured = Captured([(lambda: done.append("captured"), between)], GraphPool(torch.device("cuda:0")))
    captured.replay()
    assert done == ["captured", "met", "met again"]
