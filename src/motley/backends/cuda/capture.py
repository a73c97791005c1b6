"""A decode batch as CUDA graphs: captured once, replayed with other numbers in the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from threading import Lock
from typing import Any

import torch

Work = Callable[[], None]
Part = tuple[Work | None, Callable[[], Work] | None]


_capturing = Lock()  # torch allows one capture at a time in a process


class GraphPool:
    """Memory that all captured graphs of a model on a GPU share: one batch runs at a time, so one may write over
    another's, outputs included: see `alias_of`.

    torch gives a pool up with its last graph, and fails if another one is captured into it after that: so one graph,
    of almost nothing, stays.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        """Where captures happen: torch's own stream for that belongs to the GPU of the process's first capture."""
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @cached_property
    def _keeper(self) -> torch.cuda.CUDAGraph:
        return self._capture(lambda: torch.zeros(1, device=self._device), None)

    def capture(self, work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """The kernels that `work` launches, as a graph; none of them runs yet."""
        return self._capture(work, self._keeper.pool())

    def _capture(self, work: Callable[[], Any], pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other devices' threads go on meanwhile; only this one's calls must be fit for capture.
        mode = "thread_local"
        with _capturing:
            torch.cuda.synchronize(self._device)
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode=mode):
                work()
        return graph


class Captured:
    """Work as CUDA graphs, and what has to be done between them by other means (collectives with other devices)."""

    def __init__(self, parts: Iterable[Part], pool: GraphPool) -> None:
        """Captures and runs. `parts`: what to capture, and what then has to happen now, and in each replay."""
        self._steps: list[Work] = []
        for work, between in parts:
            if work is not None:
                self._steps.append(pool.capture(work).replay)
                self._steps[-1]()
            if between is not None:
                self._steps.append(between())

    def replay(self) -> None:
        for step in self._steps:
            step()


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers at the same address, which do not keep the memory: a graph in the same pool may write there.

    A tensor of which every captured graph had its own would be one for each size of batch.
    """
    return torch.as_tensor(_Address(tensor), device=tensor.device) if tensor.numel() else tensor


class _Address:
    """What torch makes a tensor of without copying."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": {torch.float32: "<f4", torch.int32: "<i4"}[tensor.dtype],
            "strides": None if tensor.is_contiguous() else tuple(4 * stride for stride in tensor.stride()),
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


class Lanes:
    """Streams side by side, so that several devices' kernels run at the same time; lane 0 is the current stream.
    Without any, everything goes to the current stream, one after the other.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        self._streams = streams

    @staticmethod
    def side_by_side(n_lanes: int, device: torch.device) -> Lanes:
        return Lanes([torch.cuda.Stream(device) for _ in range(n_lanes - 1)])  # type: ignore[no-untyped-call]

    @contextmanager
    def forked(self) -> Iterator[None]:
        """What the lanes do inside comes after what the current stream was given before, and before what it is given
        later. They join it also when something fails: a capture could not be ended otherwise, and hide the reason.
        """
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())
        try:
            yield
        finally:
            for stream in self._streams:
                torch.cuda.current_stream().wait_stream(stream)

    def run(self, lane: int, work: Work) -> None:
        if lane == 0 or not self._streams:
            work()
            return
        with torch.cuda.stream(self._streams[lane - 1]):
            work()
