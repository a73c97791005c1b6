"""A decode batch as CUDA graphs: captured once, replayed with other numbers in the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any

import torch

Work = Callable[[], None]
Part = tuple[Work | None, Callable[[], Work] | None]


_capturing = Lock()  # torch allows one capture at a time in a process
_MARGIN = 64 << 20  # bytes beside what a run took: the allocator's blocks in a graph's memory are other ones


class CaptureError(Exception):
    """A capture failed. Nothing of its work has run, and later captures are not affected."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class GraphPool:
    """Memory that all captured graphs of a model on a GPU share: one batch runs at a time, so one may write over
    another's, outputs included: see `alias_of`.

    torch gives a pool up with its last graph, and fails if another one is captured into it after that: so one graph,
    of almost nothing, stays.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._keeper: torch.cuda.CUDAGraph | None = None
        # Where captures happen: torch's own stream for that belongs to the GPU of the process's first capture.
        self._stream: torch.cuda.Stream | None = None
        self._n_granted = 0  # bytes that captures could take so far
        self._abandoned: list[torch.cuda.CUDAGraph] = []  # torch may still refer to them

    def capture(self, work: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """The kernels that `work` launches, as a graph; none of them runs yet. CaptureError: there is no graph."""
        with _capturing:
            if self._keeper is None:
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                # Almost nothing, but not nothing: torch warns of an empty graph.
                self._keeper = self._capture(
                    lambda: torch.zeros(1, device=self._device), torch.cuda.graph_pool_handle()
                )
            return self._capture(work, self._keeper.pool())

    def _capture(self, work: Callable[[], Any], pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # A thread's first use of cuBLAS makes a handle, which fails in a capture and breaks it.
            torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
            try:
                # Other devices' threads continue meanwhile; only the calls of this thread must be capturable.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                work()
                graph.capture_end()
            except BaseException as error:
                self._abandon(graph, pool)
                if isinstance(error, Exception):
                    raise CaptureError(error) from error
                raise
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a capture that failed. torch (2.11) ends neither the capture nor the recording into the pool if an
        error has made the capture invalid, and refuses each later capture into the pool: these get another one.
        """
        try:
            graph.capture_end()
        except Exception:
            with suppress(Exception):  # a later torch has ended it
                torch._C._cuda_endAllocateToPool(self._device.index or 0, pool)
            self._abandoned.append(graph)
            self._keeper = self._stream = None
            self._n_granted = 0

    def peak_of(self, work: Work) -> int:
        """Runs `work`; returns the most bytes that it had allocated at a time."""
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        return torch.cuda.max_memory_allocated(self._device) - before

    def has_room(self, n_bytes: int) -> bool:
        """Whether the GPU has memory for a capture of work that takes `n_bytes`, some of it given back by torch.

        Asked before a capture: one that finds no memory fails, and torch cannot free any meanwhile.
        """
        if n_bytes <= self._n_granted:  # the pool has it: one batch runs at a time
            return True
        n_needed = n_bytes + n_bytes // 4 + _MARGIN
        if torch.cuda.mem_get_info(self._device)[0] < n_needed:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        if torch.cuda.mem_get_info(self._device)[0] < n_needed:
            return False
        self._n_granted = n_bytes
        return True


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
    """A range of memory that torch makes a tensor of, without copying."""

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
        """Orders the work of the lanes inside after the earlier work of the current stream, and before its later work.
        The lanes join it also after a failure: otherwise a capture could not end, and would hide the reason.
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
