"""Connections between the processes of a crew, and collectives over them.

Tensors travel in shared memory (shared.py), or between GPUs by NCCL (nccl.py). Otherwise short ones go over direct
lines (lines.py) and long ones over Gloo's point-to-point messages, one for each pair of processes and collective. Every
process gets the parts of all devices and sums them in the order of devices: the same bits as in one process. Nothing
that is received is interpreted: the number of bytes of each message follows from the plan.
"""

from __future__ import annotations

import math
import socket
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from motley.backends import Rendezvous, have_native_collectives
from motley.errors import DeviceError
from motley.graph import Shape
from motley.runtime.device_names import is_loopback
from motley.runtime.group import PartSizes
from motley.runtime.hosts.gloo import ControlStore, Lookup, LoopThreads, Publish, make_device, sockets_of
from motley.runtime.hosts.layouts import Layout
from motley.runtime.hosts.lines import MAX_BYTES, LineClosedError, Pair, open_lines
from motley.runtime.hosts.nccl import open_nccl
from motley.runtime.hosts.shared import SharedGroups, open_shared
from motley.runtime.hosts.shortlists import best_of, expand, n_values, shorten
from motley.runtime.hosts.wire import decode, encode, is_coded, wire_bytes

_MAX_WAIT = timedelta(days=1)  # a lost process is found by the control connection, which then calls `abort`
_CONNECT_SECONDS = 30
_MAX_IN_FLIGHT = 4  # sends that may still be under way
_MAX_POSTED = 1 << 20  # bytes of receives that are posted together
_EXCHANGE_TAG, _FIRST_MESSAGE_TAG = 1, 2
_ENDED = "the connection to another process has ended"


@dataclass(frozen=True)
class _Posted:
    """Receives that were posted before their collective."""

    sizes: PartSizes
    works: list[Any]
    buffers: dict[int, torch.Tensor]  # by rank


class Mesh:
    """This process's connections to all other processes of the crew. `owners`: the rank of each device's process."""

    def __init__(
        self,
        rank: int,
        owners: Sequence[int],
        address: str,
        publish: Publish,
        lookup: Lookup,
        wire: str = "f32",
        backends: Sequence[str] = (),
        groups: Sequence[tuple[int, ...]] = (),
        devices: Sequence[str] = (),
    ) -> None:
        """`address`: this host's address on the network of the crew; Gloo listens nowhere else. `wire`: see wire.py.
        `backends`: of all devices. `groups`: of devices that split the same layers, each in one process.
        `devices`: the name of each on its host.
        """
        self.rank = rank
        self.owners = tuple(owners)
        self._wire = wire
        self._peers = [r for r in range(max(owners) + 1) if r != rank]
        self._in_flight: deque[tuple[Any, torch.Tensor]] = deque()
        self._posted: deque[_Posted] = deque()
        self._latest: PartSizes | None = None  # the latest collective of this step
        self._n_best = 0  # of the logits of each row that this step needs; 0: all
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs do not know its methods
        options = gloo._Options()
        options._timeout = timedelta(seconds=_CONNECT_SECONDS)
        options._threads = 1
        store = ControlStore(publish, lookup)
        try:
            device, threads = make_device(address)
            options._devices = [device]
            self._gloo = gloo(store, rank, len(self._peers) + 1, options)
        except RuntimeError as error:
            raise DeviceError(
                f"the processes of the crew cannot reach each other: {_first_line(error)}"
            ) from error
        self._sockets = sockets_of(store.values.values())
        self._ending = threading.Lock()  # held while sockets are shut down or closed
        self._shared = None
        if wire == "f32" and is_loopback(address):
            self._shared = open_shared(rank, owners, publish, lookup)
        self._lines = None if self._shared is not None else open_lines(rank, owners, address, publish, lookup)
        # Gloo's messages are short, and many, where there is no other way.
        self._loops = LoopThreads(threads if self._shared is None and self._lines is None else ())
        self._nccl = open_nccl(rank, owners, devices, wire, publish, lookup)
        # Where native programs do collectives without this object, if those of all devices can.
        self.rendezvous: Rendezvous | None = None
        if self._shared is not None and have_native_collectives(backends):
            own = [members for members in groups if owners[members[0]] == rank]
            self.rendezvous = self._shared.devices.rendezvous(own)

    def abort(self) -> None:
        """Ends all connections: whichever thread waits for another process fails now. May be called by any thread.

        Gloo has no way to cancel a receive. It reports a closed connection at once, so its sockets are shut down.
        """
        if self._shared is not None:
            self._shared.abort()
        if self.rendezvous is not None:
            self.rendezvous.abort()
        if self._lines is not None:
            self._lines.abort()
        if self._nccl is not None:
            self._nccl.abort()
        with self._ending:
            for own in self._sockets:
                with suppress(OSError):
                    own.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort()
        with self._ending:  # another thread may be in `abort`
            for own in self._sockets:
                own.close()
            self._sockets = []
        if self._lines is not None:
            self._lines.close()
        if self._nccl is not None:
            self._nccl.close()
        self._in_flight.clear()
        self._posted.clear()

    def begin(self, n_best: int = 0) -> None:
        """Starts a step. `n_best`: of the largest logits of each row that rank 0 needs; 0: all."""
        self._latest = None
        self._n_best = n_best

    def is_on_gpus(self, sizes: PartSizes) -> bool:
        """Whether a collective goes from GPU to GPU (`exchange_on_gpus`). The candidates of samplers do not."""
        return self._nccl is not None and not self._best_of(sizes)

    def exchange_on_gpus(
        self, device: int, part: torch.Tensor | None, sizes: PartSizes
    ) -> list[torch.Tensor | None]:
        """The parts of all devices. Each device of this process calls it."""
        assert self._nccl is not None
        with _lost_if_closed():
            return self._nccl.exchange(device, part, sizes)

    def exchange(self, own: Sequence[torch.Tensor | None], sizes: PartSizes) -> list[torch.Tensor | None]:
        """The parts of all devices from those of this process, in the order of devices.

        Empty if another process has the only reader of the result.
        """
        if self._shared is not None:
            return self._exchange_shared(self._shared, own, sizes)
        n_best = self._best_of(sizes)
        if n_best:
            return self._exchange_best(own, sizes, n_best)
        layout = self._layout(sizes)
        is_short = self._lines is not None and layout.max_bytes <= MAX_BYTES
        posted = None if is_short else self._take_posted(sizes)
        data = _message(own, sizes, layout.wire)
        if posted is None:
            found = self._exchange_short(data, layout)
        else:
            self._loops.follow()
            if len(data):
                for rank in layout.receivers:
                    self._send(data, rank, _EXCHANGE_TAG)
            for work in posted.works:
                _wait(work)
            found = posted.buffers
            if not self._posted and sizes.follower is not None and sizes.follower.reader is None:
                self._post_from(sizes.follower)
        return layout.parts({self.rank: data, **found}, len(self.owners)) if layout.reads else []

    def _layout(self, sizes: PartSizes) -> Layout:
        if sizes.layout is None:
            sizes.layout = Layout.of(sizes, self.owners, self.rank, self._wire)
        layout: Layout = sizes.layout
        return layout

    def _best_of(self, sizes: PartSizes) -> int:
        """How many of the largest values of each row travel; 0: all."""
        return best_of(sizes, self._n_best) if sizes.reader is not None and self._lines is not None else 0

    def _exchange_best(
        self, own: Sequence[torch.Tensor | None], sizes: PartSizes, n_best: int
    ) -> list[torch.Tensor | None]:
        """The largest values of each row, for the only reader."""
        layout = self._layout(sizes)
        if not layout.reads:
            coded = [shorten(part, n_best) for part in own if part is not None]
            sent = _bytes_of(coded[0] if len(coded) == 1 else torch.cat([*coded, torch.empty(0)]))
            self._transfer({self._first_pair(rank): sent for rank in layout.receivers}, {})
            return []
        counts = {r: [2 * n_values(span.shape, n_best) for span in layout.spans[r]] for r in self._peers}
        found = {rank: torch.empty(sum(counts[rank])) for rank in self._peers}
        self._transfer({}, {self._first_pair(rank): _bytes_of(data) for rank, data in found.items()})
        parts: list[torch.Tensor | None] = [None] * len(self.owners)
        for device, part in zip(self._members, own, strict=True):
            parts[device] = part
        for rank, data in found.items():
            end = 0
            for span, n in zip(layout.spans[rank], counts[rank], strict=True):
                parts[span.device], end = expand(data[end : end + n], span.shape), end + n
        return parts

    @property
    def _members(self) -> list[int]:
        """The devices of this process."""
        return [device for device, owner in enumerate(self.owners) if owner == self.rank]

    def _exchange_short(self, data: torch.Tensor, layout: Layout) -> dict[int, torch.Tensor]:
        """The messages of other processes, by rank, over direct lines."""
        sources = self._peers if layout.reads else []
        found = {rank: torch.empty(layout.counts[rank], dtype=layout.dtype) for rank in sources}
        sent = _bytes_of(data)
        self._transfer(
            {self._first_pair(rank): sent for rank in layout.receivers},
            {self._first_pair(rank): _bytes_of(part) for rank, part in found.items()},
        )
        return found

    def _transfer(self, sends: Mapping[Pair, memoryview], receives: Mapping[Pair, memoryview]) -> None:
        assert self._lines is not None
        with _lost_if_closed():
            self._lines.transfer(sends, receives)

    def _first_pair(self, rank: int) -> Pair:
        """The first devices of this process and of another one: their line is for collectives, too."""
        return self.owners.index(self.rank), self.owners.index(rank)

    def _exchange_shared(
        self, shared: SharedGroups, own: Sequence[torch.Tensor | None], sizes: PartSizes
    ) -> list[torch.Tensor | None]:
        layout = self._layout(sizes)
        data = _message(own, sizes, None)
        found = shared.ranks.exchange(self.rank, data, list(layout.counts))
        if found is None:
            raise PeerLostError(_ENDED)
        return layout.parts({self.rank: data, **found}, len(self.owners))

    def send(self, tensor: torch.Tensor, source: int, target: int) -> None:
        """Sends a tensor from a device of this process to a device of another one."""
        if self._nccl is not None:
            with _lost_if_closed():
                self._nccl.send(tensor, source, target)
            return
        data = _flat(tensor, tensor.dtype)
        if self._shared is not None:
            if not self._shared.devices.send(source, target, data):
                raise PeerLostError(_ENDED)
            return
        data = encode(self._wire, data) if is_coded(self._wire, tensor.dtype) else data.clone()
        if self._lines is not None and data.nbytes <= MAX_BYTES:
            self._transfer({(source, target): _bytes_of(data)}, {})
        elif data.numel():
            self._send(data, self.owners[target], self._tag(source, target))

    def receive(self, source: int, target: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        if self._nccl is not None:
            with _lost_if_closed():
                return self._nccl.receive(source, target, shape, dtype)
        n_values, is_short = math.prod(shape), is_coded(self._wire, dtype)
        if self._shared is not None:
            found = torch.empty(shape, dtype=dtype)
            if not self._shared.devices.receive(source, target, found):
                raise PeerLostError(_ENDED)
            return found
        n_items = wire_bytes(self._wire, n_values) if is_short else n_values
        buffer = torch.empty(n_items, dtype=torch.uint8 if is_short else dtype)
        if self._lines is not None and buffer.nbytes <= MAX_BYTES:
            self._transfer({}, {(target, source): _bytes_of(buffer)})
        elif n_items:
            _wait(self._gloo.recv([buffer], self.owners[source], self._tag(source, target)))
        return (decode(self._wire, buffer, n_values) if is_short else buffer).view(shape)

    def _tag(self, source: int, target: int) -> int:
        return _FIRST_MESSAGE_TAG + source * len(self.owners) + target

    def _send(self, data: torch.Tensor, rank: int, tag: int) -> None:
        while len(self._in_flight) >= _MAX_IN_FLIGHT * len(self._peers):
            _wait(self._in_flight.popleft()[0])
        self._in_flight.append((self._gloo.send([data], rank, tag), data))

    def _take_posted(self, sizes: PartSizes) -> _Posted:
        """The receives of a collective: those that were posted ahead, or new ones."""
        if self._latest is not None:
            self._latest.follower = sizes
        self._latest = sizes
        if not self._posted:
            self._post_from(sizes)
        posted = self._posted.popleft()
        assert posted.sizes is sizes, "a plan's collectives have changed their order"
        return posted

    def _post_from(self, sizes: PartSizes | None) -> None:
        """Posts the receives of a collective and of those that follow in its plan: a sender waits for the receiver
        otherwise, and Gloo's threads are woken for each of them.

        Not ahead: those with one reader, which may take another way in the next step.
        """
        n_bytes = 0
        while sizes is not None and (not self._posted or sizes.reader is None):
            posted = self._post(sizes)
            n_bytes += sum(buffer.nbytes for buffer in posted.buffers.values())
            self._posted.append(posted)
            sizes = sizes.follower if n_bytes < _MAX_POSTED else None

    def _post(self, sizes: PartSizes) -> _Posted:
        layout = self._layout(sizes)
        sources = self._peers if layout.reads else []
        if sizes.buffers is None or sizes.buffers[0] is not self._gloo:
            empty = {rank: torch.empty(layout.counts[rank], dtype=layout.dtype) for rank in sources}
            sizes.buffers = self._gloo, empty
        buffers: dict[int, torch.Tensor] = sizes.buffers[
            1
        ]  # those of the step before: its parts have been read
        works = [self._gloo.recv([data], rank, _EXCHANGE_TAG) for rank, data in buffers.items() if len(data)]
        return _Posted(sizes, works, buffers)


def _message(own: Sequence[torch.Tensor | None], sizes: PartSizes, wire: str | None) -> torch.Tensor:
    """The parts of this process's devices, one after the other. A tensor of its own, which may be sent later."""
    parts = [_flat(part, sizes.dtype) for part in own if part is not None]
    if len(parts) == 1:
        return encode(wire, parts[0]) if wire else parts[0].clone()
    coded = [encode(wire, part) for part in parts] if wire else parts
    return torch.cat(coded) if coded else torch.empty(0, dtype=sizes.dtype)


def _flat(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if part.dtype == dtype and part.is_cpu:
        return part.reshape(-1)
    return part.detach().to("cpu", dtype).flatten()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    data: Any = (tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)).numpy()
    return memoryview(data)


def _wait(work: Any) -> None:
    """Waits for a message. PeerLostError if its connection has ended."""
    try:
        work.wait(_MAX_WAIT)
    except RuntimeError as error:
        raise PeerLostError(f"{_ENDED}: {_first_line(error)}") from error


@contextmanager
def _lost_if_closed() -> Iterator[None]:
    try:
        yield
    except LineClosedError as error:
        raise PeerLostError(f"{_ENDED}: {error}") from error


class PeerLostError(DeviceError):
    """Another process has ended its connection: the consequence of a loss or failure elsewhere."""


def _first_line(error: BaseException) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.split("] ", 1)[-1]
