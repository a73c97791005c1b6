"""Devices that work on one batch together, and their communication.

`Communicator` is the whole interface; each device has one. `ThreadGroup` is the implementation within a process, with
one thread for each device; `runtime.hosts.mesh` has the implementation for devices of several processes.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from motley.backends import DeviceMessages, MessagePlaces, Rendezvous
from motley.errors import DeviceError, MotleyError
from motley.graph import F32, I32, Graph, Shape, Tensor
from motley.ownership import Word
from motley.plan import Launch, Single, Stage
from motley.runtime.messages import message_launch, places_of
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
_DTYPES = {F32: torch.float32, I32: torch.int32}


@dataclass(eq=False, slots=True)
class PartSizes:
    """The shape of each device's part in one collective (None: it sends nothing), and the type of all parts."""

    shapes: tuple[Shape | None, ...]  # by device of the crew
    dtype: torch.dtype
    is_sum: bool = False  # parts are addends, which may be rounded on the wire
    reader: int | None = None  # the only device that needs the result; None: all
    has_rows: bool = False  # parts are whole rows, or parts of rows side by side
    members: tuple[int, ...] = ()  # the devices that take part, of one process; empty: all of the crew
    follower: PartSizes | None = None  # of the next collective of the same plan, once it is known
    layout: Any = None  # of its messages between processes, once it is known (hosts.layouts)
    buffers: Any = None  # for the messages of other processes, with the connection that they belong to

    @staticmethod
    def of(node: Tensor, n_devices: int, reader: int | None = None) -> PartSizes:
        """The sizes of the parts of a collective of all devices, or of a group of devices."""
        op, dtype = node.op, _DTYPES[node.dtype]
        assert isinstance(op, Collective)
        if isinstance(op, Broadcast):
            root = tuple(op.size if d == op.root else None for d in range(n_devices))
            return PartSizes(root, dtype, reader=reader, has_rows=True, members=op.members)
        shape = node.inputs[0].shape
        if isinstance(op, AllGather):
            counts = [op.word.count(device) for device in range(n_devices)]
            shapes = tuple((*shape[: op.axis], n, *shape[op.axis + 1 :]) for n in counts)
            has_rows = op.axis == len(shape) - 1
            return PartSizes(shapes, dtype, reader=reader, has_rows=has_rows, members=op.members)
        is_in = [not op.members or device in op.members for device in range(n_devices)]
        addends = tuple(shape if is_member else None for is_member in is_in)
        return PartSizes(addends, dtype, is_sum=True, reader=reader, members=op.members)


class Communicator(Protocol):
    """One device's connection to the others. All devices make the same calls in the same order; only the sender and
    the receiver of a message call `send` and `receive`.
    """

    device: int  # its number in the crew
    n_devices: int  # of the crew
    reader: int  # the device whose outputs are read: the first of rank 0

    def exchange(self, part: torch.Tensor | None, sizes: PartSizes) -> Sequence[torch.Tensor | None]:
        """The tensors of all devices, in the order of devices. They may be read until the next call.

        Devices that take no part have none. May be empty if another device is the only reader of the result.
        """
        ...

    def send(self, tensor: torch.Tensor, target: int) -> None: ...

    def receive(self, source: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor: ...


class CollectiveKernel:
    """Runs collectives on a communicator. Addends are summed in the order of devices: all devices get the same bits."""

    name = "collective"

    def __init__(self, line: Communicator, outputs: Sequence[Tensor] = ()) -> None:
        """`outputs`: of the graph. Only those of the communicator's `reader` are read."""
        self._line = line
        self._outputs = outputs
        # The rendezvous where executables do collectives by themselves, if the communicator has one, and this device.
        self.rendezvous: tuple[Rendezvous, int] | None = getattr(line, "rendezvous", None)
        # See HasMessages; a native program's own side has places only.
        self.messages: DeviceMessages | None = None
        self.places: Mapping[Tensor, MessagePlaces] = {}

    def of(self, graph: Graph) -> CollectiveKernel:
        """The kernel for the collectives of a graph."""
        kernel, line = CollectiveKernel(self._line, graph.outputs), self._line
        n_values = getattr(line, "n_message_values", 0)
        if n_values:
            kernel.places = places_of(graph, line.device, line.reader, n_values)
            kernel.messages = getattr(line, "messages", None) if kernel.places else None
        return kernel

    def supports(self, stage: Stage) -> str | None:
        is_collective = isinstance(stage, Single) and isinstance(stage.node.op, Collective)
        return None if is_collective else "no collective"

    def prepare(self, stage: Stage) -> Launch:
        assert isinstance(stage, Single)
        node, op, line = stage.node, stage.node.op, self._line
        if self.messages is not None:
            return message_launch(node, line.device, self.places[node], self.messages)
        is_message = isinstance(op, Send | Receive)
        reader = line.reader if any(node is output for output in self._outputs) else None
        sizes = None if is_message else PartSizes.of(node, line.n_devices, reader)
        assert isinstance(op, Collective)
        members = op.members or tuple(range(line.n_devices))

        def exchange(part: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
            assert sizes is not None
            return line.exchange(part, sizes)

        def launch(inputs: Sequence[Any], out: Any) -> Any:
            parts = () if is_message else exchange(inputs[0] if inputs else None)
            if not is_message and not parts:
                return out  # only another device reads it
            match op:
                case AllReduce():
                    _sum_into(out, [_some(parts[member]) for member in members])
                case ReduceScatter(axis, word, device):
                    _sum_into(out, [take(_some(parts[m]), axis, word, device) for m in members])
                case AllGather(axis, word):
                    _join_into(out, {member: _some(parts[member]) for member in members}, axis, word)
                case Broadcast(root, _):
                    _copy_into(out, _some(parts[root]))
                case Send(_, target):
                    line.send(inputs[0], target)
                case Receive(source, _, size, kind):
                    _copy_into(out, line.receive(source, size, _DTYPES[kind]))
            return out

        return launch


def _copy_into(out: torch.Tensor, part: torch.Tensor) -> None:
    """Does not wait if a GPU copies from pinned memory: the line writes there again after that (RendezvousLine)."""
    out.copy_(part, non_blocking=out.is_cuda)


def _sum_into(out: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    own = [part.to(out.device, non_blocking=out.is_cuda) for part in parts]
    if len(own) == 2:
        torch.add(own[0], own[1], out=out)  # of two devices, which are the most frequent: one kernel of a GPU
        return
    total = own[0].clone()
    for part in own[1:]:
        total += part
    out.copy_(total)


def _join_into(out: torch.Tensor, parts: Mapping[int, torch.Tensor], axis: int, word: Word) -> None:
    for device, part in parts.items():
        put(out, part.to(out.device, non_blocking=out.is_cuda), axis, word, device)


def _some(part: torch.Tensor | None) -> torch.Tensor:
    assert part is not None, "a device sent nothing"
    return part


class ThreadGroup:
    """Devices of one process, each on a thread of its own."""

    def __init__(
        self,
        n_threads: Sequence[int],
        cores: Sequence[Sequence[int]] | None = None,
        rendezvous: Rendezvous | None = None,
        groups: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """For each device, its number of threads and the cores that they are pinned to. `rendezvous`: where the
        executables of all devices do collectives without this group. `groups`: devices that have collectives of their
        own.
        """
        n_devices = len(n_threads)
        self.rendezvous = rendezvous
        self._exchanges: dict[tuple[int, ...], _Exchange] = {(): _Exchange(n_devices, range(n_devices))}
        self._exchanges |= {members: _Exchange(n_devices, members) for members in groups}
        self._queues: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor | None]] = {
            (a, b): queue.SimpleQueue() for a in range(n_devices) for b in range(n_devices)
        }
        self._workers = list(map(_Worker, range(n_devices), n_threads, cores or [()] * n_devices))
        # Also at garbage collection and at exit.
        self.close = weakref.finalize(self, _stop_workers, self._workers)
        self.lines = [_Line(self, device) for device in range(n_devices)]

    def run(self, work: Callable[[int], T]) -> list[T]:
        """The results of `work(device)` on all devices at once. The first failure aborts the others and is raised.

        An interrupt also aborts all devices. It is raised after every device has stopped working.
        """
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        jobs = [_Job(work, self._abort_peers, done) for _ in self._workers]
        try:
            for worker, job in zip(self._workers, jobs, strict=True):
                worker.jobs.put(job)
            while not all(job.is_over for job in jobs):
                done.get()
        except BaseException:
            self._wait_or_revoke(jobs)
            raise
        errors = [job.error for job in jobs if job.error is not None]
        if errors:
            self._reset()
            causes = [error for error in errors if not self._is_consequence(error)]
            cause = causes[0] if causes else errors[0]
            if isinstance(cause, MotleyError):
                raise cause
            raise DeviceError(f"a device failed: {cause}") from cause
        return [job.result for job in jobs]

    def _is_consequence(self, error: BaseException) -> bool:
        """Whether a device failed only because another device had failed."""
        own = () if self.rendezvous is None else (self.rendezvous.aborted_error,)
        kinds = (threading.BrokenBarrierError, _AbortedError, *own)
        return isinstance(error, kinds) or isinstance(error.__cause__, kinds)

    def _wait_or_revoke(self, jobs: Sequence[_Job]) -> None:
        """Revokes jobs that have not begun and waits for the others, after an interrupt. Ignores further interrupts."""
        while True:
            try:
                for job in jobs:
                    job.revoke()
                for device in range(len(self._workers)):
                    self._abort_peers(device)
                while not all(job.is_over for job in jobs):
                    time.sleep(0.001)
                self._reset()
                return
            except KeyboardInterrupt:
                continue

    def _abort_peers(self, device: int) -> None:
        """Aborts the devices that wait for a failed device, which would otherwise wait without end."""
        for exchange in self._exchanges.values():
            exchange.barrier.abort()
        if self.rendezvous is not None:
            self.rendezvous.abort()
        for (_, target), inbox in self._queues.items():
            if target != device:
                inbox.put(None)

    def _reset(self) -> None:
        for exchange in self._exchanges.values():
            exchange.reset()
        if self.rendezvous is not None:
            self.rendezvous.reset()
        for inbox in self._queues.values():
            while not inbox.empty():
                inbox.get()


class _Job:
    """A piece of work for one device, and its result. It is run or revoked, never both."""

    def __init__(
        self, work: Callable[[int], Any], abort_peers: Callable[[int], None], done: queue.SimpleQueue[None]
    ) -> None:
        self._work = work
        self._context = copy_context()  # what applies to the caller applies to its devices
        self._abort_peers = abort_peers
        self._done = done
        self._fate: dict[str, str] = {}  # set once, by `setdefault`, which no interrupt can split
        self._is_done = False
        self.result: Any = None
        self.error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self._is_done or self._fate.get("is") == "revoked"

    def run(self, device: int) -> None:
        """Does the work, unless it was revoked, and stores its result. Called by the device's own thread."""
        if self._fate.setdefault("is", "run") != "run":
            return
        try:
            self.result = self._context.run(self._work, device)
        except BaseException as error:
            self.error = error
            self._abort_peers(device)
        self._is_done = True
        self._done.put(None)

    def revoke(self) -> None:
        """Prevents the job from running, if it has not begun."""
        self._fate.setdefault("is", "revoked")


class _Worker(threading.Thread):
    """One device's thread: runs jobs until it gets None. It has no reference to its group, so that an unused group can
    be garbage-collected.
    """

    def __init__(self, device: int, n_threads: int, cores: Sequence[int]) -> None:
        super().__init__(name=f"motley-{device}", daemon=True)
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._device = device
        self._n_threads = n_threads
        self._cores = cores
        self.start()

    def run(self) -> None:
        torch.set_num_threads(self._n_threads)  # partly global: the last model's value applies
        if self._cores:
            os.sched_setaffinity(0, self._cores)  # for this thread, and for the threads that it starts
        while (job := self.jobs.get()) is not None:
            job.run(self._device)
            del job  # a finished job must not keep its tensors alive until the next


def _stop_workers(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.jobs.put(None)
    for worker in workers:
        if worker is not threading.current_thread():
            worker.join()


class _AbortedError(Exception):
    """Another device has failed."""


class _Exchange:
    """The exchange of tensors between some devices of a ThreadGroup.

    Tensors are copied into one of two sets of slots, alternately. A device writes to a set again only after
    the barrier of the exchange in between, and by then all devices have read it: one barrier per exchange is enough.
    """

    def __init__(self, n_devices: int, members: Sequence[int]) -> None:
        self.barrier = threading.Barrier(len(members))
        self._slots: list[list[torch.Tensor | None]] = [[None] * n_devices, [None] * n_devices]
        self._n_done = [0] * n_devices  # exchanges of each device

    def run(self, device: int, part: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        slots = self._slots[self._n_done[device] % 2]
        self._n_done[device] += 1
        slots[device] = None if part is None else part.clone()
        self.barrier.wait()
        return slots

    def reset(self) -> None:
        self.barrier.reset()
        self._n_done = [0] * len(self._n_done)


class _Line:
    """One device's communicator in a ThreadGroup."""

    def __init__(self, group: ThreadGroup, device: int) -> None:
        self._group = group
        self.device = device
        self.n_devices = len(group._workers)
        self.reader = 0
        self.rendezvous = None if group.rendezvous is None else (group.rendezvous, device)

    def exchange(
        self, part: torch.Tensor | None, sizes: PartSizes | None = None
    ) -> Sequence[torch.Tensor | None]:
        return self.exchange_among(() if sizes is None else sizes.members, part)

    def exchange_among(
        self, members: tuple[int, ...], part: torch.Tensor | None
    ) -> Sequence[torch.Tensor | None]:
        """The parts of some devices; empty: of all."""
        return self._group._exchanges[members].run(self.device, part)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        self._group._queues[self.device, target].put(tensor.clone())

    def receive(self, source: int, shape: Shape = (), dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self._group._queues[source, self.device].get()
        if tensor is None:
            raise _AbortedError
        return tensor
