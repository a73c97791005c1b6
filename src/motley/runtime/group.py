"""Devices that work on one batch together, and how they talk.

`Communicator` is the whole interface: one for each device. `ThreadGroup` is the in-process implementation, a thread
for each device; processes can be another.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from motley.backends.cpu import NativeHungUpError, meeting_place
from motley.errors import DeviceError, MotleyError
from motley.graph import Tensor
from motley.ownership import Word
from motley.plan import Launch
from motley.split.collectives import (
    AllGather,
    AllReduce,
    Broadcast,
    Collective,
    Receive,
    ReduceScatter,
    Send,
    put,
    take,
)

T = TypeVar("T")


class Communicator(Protocol):
    """One device's line to the others. All make the same calls in the same order (send and receive: both ends)."""

    device: int

    def exchange(self, part: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """Everybody's tensors, by device. They may be read until the next call."""
        ...

    def send(self, tensor: torch.Tensor, target: int) -> None: ...

    def receive(self, source: int) -> torch.Tensor: ...


class CollectiveKernel:
    """Runs collectives on a communicator. Sums are made in the order of devices, so all of them get the same bits."""

    name = "collective"

    def __init__(self, line: Communicator) -> None:
        self._line = line
        # Native programs meet there by themselves, where the line has such a place: (place, device).
        self.meeting: tuple[Any, int] | None = getattr(line, "meeting", None)

    def supports(self, node: Tensor) -> str | None:
        return None if isinstance(node.op, Collective) else "no collective"

    def prepare(self, node: Tensor) -> Launch:
        op, line = node.op, self._line

        def launch(inputs: Sequence[Any], out: Any) -> Any:
            match op:
                case AllReduce():
                    _sum_into(out, line.exchange(inputs[0]))
                case ReduceScatter(axis, word, device):
                    _sum_into(out, [take(_some(t), axis, word, device) for t in line.exchange(inputs[0])])
                case AllGather(axis, word):
                    _join_into(out, line.exchange(inputs[0]), axis, word)
                case Broadcast(root, _):
                    out.copy_(line.exchange(inputs[0] if inputs else None)[root])
                case Send(_, target):
                    line.send(inputs[0], target)
                case Receive(source, _, _):
                    out.copy_(line.receive(source))
            return out

        return launch


def _sum_into(out: torch.Tensor, parts: Sequence[torch.Tensor | None]) -> None:
    total = _some(parts[0]).to(out.device, copy=True)
    for part in parts[1:]:
        total += _some(part).to(out.device)
    out.copy_(total)


def _join_into(out: torch.Tensor, parts: Sequence[torch.Tensor | None], axis: int, word: Word) -> None:
    for device, part in enumerate(parts):
        put(out, _some(part), axis, word, device)


def _some(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "a device sent nothing"
    return tensor


class ThreadGroup:
    """Devices of one process, each on a thread of its own."""

    def __init__(
        self,
        n_threads: Sequence[int],
        cores: Sequence[Sequence[int]] | None = None,
        *,
        is_native: bool = True,
    ) -> None:
        """For each device, its threads and the cores that they keep to. `is_native`: all run native code."""
        n_devices = len(n_threads)
        self._barrier = threading.Barrier(n_devices)
        # Where native programs meet; None without the compiled module, or with somebody who cannot come there.
        self.native = meeting_place(n_devices) if is_native else None
        self._slots: list[list[torch.Tensor | None]] = [[None] * n_devices, [None] * n_devices]
        self._mail: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor | None]] = {
            (a, b): queue.SimpleQueue() for a in range(n_devices) for b in range(n_devices)
        }
        self._workers = list(map(_Worker, range(n_devices), n_threads, cores or [()] * n_devices))
        self.close = weakref.finalize(self, _dismiss, self._workers)  # also when it is forgotten, and at exit
        self.lines = [_Line(self, device) for device in range(n_devices)]

    def run(self, work: Callable[[int], T]) -> list[T]:
        """`work(device)` on all devices at once; the first failure ends the others and is raised."""
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        jobs = [_Job(work, self._hang_up, done) for _ in self._workers]
        for worker, job in zip(self._workers, jobs, strict=True):
            worker.jobs.put(job)
        self._wait(jobs, done)
        errors = [job.error for job in jobs if job.error is not None]
        if errors:
            self._reset()
            causes = [
                error
                for error in errors
                if not isinstance(error, threading.BrokenBarrierError | _HungUpError | NativeHungUpError)
            ]
            cause = causes[0] if causes else errors[0]
            if isinstance(cause, MotleyError):
                raise cause
            raise DeviceError(f"a device failed: {cause}") from cause
        return [job.result for job in jobs]

    def _wait(self, jobs: Sequence[_Job], done: queue.SimpleQueue[None]) -> None:
        """Until all jobs are over. An interrupt is raised only then: no device is left in the middle of a batch."""
        interrupt: KeyboardInterrupt | None = None
        while not all(job.is_over for job in jobs):
            try:
                # A signal that an interrupt swallowed is missed for no longer than this.
                done.get(timeout=0.1)
            except queue.Empty:
                pass
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _hang_up(self, device: int) -> None:
        """A device has failed: whoever waits for it must not wait for ever."""
        self._barrier.abort()
        if self.native is not None:
            self.native.abort()
        for (_, target), box in self._mail.items():
            if target != device:
                box.put(None)

    def _reset(self) -> None:
        self._barrier.reset()
        if self.native is not None:
            self.native.reset()
        for box in self._mail.values():
            while not box.empty():
                box.get()
        for line in self.lines:
            line.n_exchanges = 0


class _Job:
    """A piece of work for one device, and what came of it."""

    def __init__(
        self, work: Callable[[int], Any], hang_up: Callable[[int], None], done: queue.SimpleQueue[None]
    ) -> None:
        self.work = work
        self.hang_up = hang_up
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_over = False
        self._done = done

    def finish(self) -> None:
        self.is_over = True
        self._done.put(None)


class _Worker(threading.Thread):
    """One device's thread: does jobs until it gets None. It knows no group, so that a forgotten one can go."""

    def __init__(self, device: int, n_threads: int, cores: Sequence[int]) -> None:
        super().__init__(name=f"motley-{device}", daemon=True)
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._device = device
        self._n_threads = n_threads
        self._cores = cores
        self.start()

    def run(self) -> None:
        torch.set_num_threads(self._n_threads)  # a part of it is global: the last model's counts for all
        if self._cores:
            os.sched_setaffinity(0, self._cores)  # of this thread, and of those that it starts
        while (job := self.jobs.get()) is not None:
            try:
                job.result = job.work(self._device)
            except BaseException as error:
                job.error = error
                job.hang_up(self._device)
            job.finish()
            del job  # a finished job must not keep its tensors alive until the next


def _dismiss(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.jobs.put(None)
    for worker in workers:
        if worker is not threading.current_thread():
            worker.join()


class _HungUpError(Exception):
    """Another device has failed."""


class _Line:
    """One device's line in a ThreadGroup.

    What is exchanged is copied into one of two sets of slots in turn. A device can only write to a set again after the
    barrier in between, and by then everybody has read it: one barrier for each exchange is enough.
    """

    def __init__(self, group: ThreadGroup, device: int) -> None:
        self._group = group
        self.device = device
        self.meeting = None if group.native is None else (group.native, device)
        self.n_exchanges = 0

    def exchange(self, part: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        slots = self._group._slots[self.n_exchanges % 2]
        self.n_exchanges += 1
        slots[self.device] = None if part is None else part.clone()
        self._group._barrier.wait()
        return slots

    def send(self, tensor: torch.Tensor, target: int) -> None:
        self._group._mail[self.device, target].put(tensor.clone())

    def receive(self, source: int) -> torch.Tensor:
        tensor = self._group._mail[source, self.device].get()
        if tensor is None:
            raise _HungUpError
        return tensor
