"""Rank 0's side of a crew of several processes: a `RemoteWorker` for each worker, and `Hosts`, all of them together.

A worker is lost when its connection ends, when it reports a failure, or when it has not answered for some seconds.
Then the connections between all processes are ended, so that no device waits for ever; the step fails with a
LostWorkerError that names the worker. The crew is connected again as a whole.
"""

from __future__ import annotations

import json
import logging
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from motley.errors import DeviceError, LostWorkerError, MotleyError
from motley.kvcache.arena import CacheBatch
from motley.kvcache.sequences import BlockCopy, BlockShift
from motley.models import BatchShape
from motley.runtime.batch import PlacedBatch
from motley.runtime.caching import CachePlan
from motley.runtime.crew import is_loopback, parse_address
from motley.runtime.hosts.addresses import AddressBook, read_address, write_address
from motley.runtime.hosts.mesh import Mesh, MeshLink
from motley.runtime.hosts.messages import (
    MAX_SLOTS,
    DeviceBytes,
    StepWriter,
    emptied_message,
    layer_slots_message,
    shifts_message,
    split_bytes,
)
from motley.runtime.hosts.opening import Opening
from motley.runtime.hosts.protocol import Channel, Kind, ProtocolError, call, read_json
from motley.runtime.inventory import DeviceInfo
from motley.runtime.loading import Progress
from motley.runtime.worker import CacheBytes

_log = logging.getLogger("motley")
CONNECT_SECONDS = 10.0
PING_SECONDS = 1.0
SILENT_SECONDS = 8.0  # without an answer to pings a worker is lost
RETRY_SECONDS = 1.0  # between attempts to connect a crew again
_NAMING_SECONDS = 2.0  # time for the control connection to say why a step failed


class RefusedError(DeviceError):
    """A worker has refused a crew. It ends the connection afterwards."""


class RemoteWorker:
    """A worker process, seen from rank 0. The engine's thread calls its methods, a thread of its own listens."""

    def __init__(
        self,
        host: str,
        secret: bytes,
        on_address: Callable[[str, bytes], None],
        on_loss: Callable[[MotleyError], None],
        devices: Sequence[DeviceBytes],
    ) -> None:
        """`host`: address and port. `devices`: the sizes of the cache of each device of the worker."""
        self.host = host
        self.heard = time.monotonic()
        self.failure: MotleyError | None = None  # why it is lost
        self.is_consequence = False  # it failed only because another process was lost
        self.progress = (0, 0)  # bytes of weights that it has loaded, bytes in all
        self._on_address, self._on_loss = on_address, on_loss
        self._devices = devices
        self._writer = StepWriter()
        self._answers: queue.SimpleQueue[tuple[Kind, bytes] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._channel = connect(host, secret)
        threading.Thread(target=self._listen, name=f"motley-{host}", daemon=True).start()

    @property
    def local_address(self) -> str:
        return self._channel.local_address

    # The crew

    def open(self, opening: Opening) -> None:
        """Begins to load; `wait_ready` waits for its end."""
        self._send_json(Kind.OPEN, **opening.as_json())

    def connect_mesh(self) -> None:
        self._send(Kind.CONNECT)

    def send_address(self, key: str, value: bytes) -> None:
        self._send(Kind.ADDRESS, write_address(key, value))

    def wait_ready(self, on_progress: Callable[[], None] | None = None) -> None:
        """Waits until the worker has done what it was asked. DeviceError, as the worker gives it, if it refuses."""
        while True:
            try:
                found = self._answers.get(timeout=0.2)
            except queue.Empty:
                if on_progress is not None:
                    on_progress()
                continue
            kind, payload = self._unless_lost(found)
            if kind == Kind.REFUSED:
                fields = read_json(payload)
                raise RefusedError(
                    f"{self.host} refuses: {fields.get('message')}",
                    hint=str(fields.get("hint") or "") or None,
                )
            if kind == Kind.READY:
                return

    def ping(self) -> None:
        """Asks for a sign of life; a worker that has given none for long is lost."""
        silent = time.monotonic() - self.heard
        if silent > SILENT_SECONDS:
            self._lose(f"it has not answered for {silent:.0f} s")
            return
        try:
            self._channel.send(Kind.PING)
        except OSError as error:
            self._lose(str(error))

    def close(self) -> None:
        """Says goodbye, so that the worker frees its memory, and ends the connection."""
        self._is_closed = True
        if self.failure is None:
            with suppress(OSError):
                self._channel.send(Kind.CLOSE)
        self._channel.close()

    def break_off(self) -> None:
        """Ends the connection without a goodbye: the worker keeps its weights for the next one."""
        self._is_closed = True
        self._channel.close()

    # Its work

    def run(
        self,
        shape: BatchShape,
        batch: PlacedBatch,
        inputs: Mapping[str, torch.Tensor],
        copies: Sequence[BlockCopy],
    ) -> None:
        self._send(Kind.RUN, self._writer.run(shape, batch, inputs, copies))

    def store_random(self, batch: Sequence[CacheBatch]) -> None:
        self._send(Kind.STORE_RANDOM, self._writer.batches(batch))

    def shift(self, shifts: Sequence[BlockShift]) -> None:
        self._send(Kind.SHIFT, shifts_message(shifts))

    def give_back(self, emptied: Sequence[Sequence[int]]) -> None:
        self._send(Kind.GIVE_BACK, emptied_message(emptied))

    def require_shift(self) -> None:
        self._ask(Kind.REQUIRE_SHIFT)

    def memory(self) -> tuple[list[dict[str, int]], list[CacheBytes]]:
        """Bytes by purpose, and of the cache, for each device."""
        fields = read_json(self._ask(Kind.MEMORY))
        memory = [{str(k): int(v) for k, v in device.items()} for device in fields["memory"]]
        cache = [CacheBytes(tuple(map(int, groups)), int(resident)) for groups, resident in fields["cache"]]
        return memory, cache

    def gather(self, layer: int, slots: torch.Tensor) -> list[tuple[dict[str, torch.Tensor], ...]]:
        pieces = []
        for some in torch.split(slots.reshape(-1), MAX_SLOTS):
            data = self._ask(Kind.GATHER, layer_slots_message(layer, some))
            try:
                pieces.append(split_bytes(self._devices, layer, len(some), data))
            except ProtocolError as error:
                raise self._lose(error.message) from error
        if len(pieces) == 1:
            return pieces[0]
        first = pieces[0]
        return [
            tuple(
                {name: torch.cat([piece[device][i][name] for piece in pieces]) for name in planes}
                for i, planes in enumerate(first[device])
            )
            for device in range(len(first))
        ]

    def scatter(
        self, layer: int, slots: torch.Tensor, parts: Sequence[Sequence[Mapping[str, torch.Tensor]]]
    ) -> None:
        slots = slots.reshape(-1)
        for start in range(0, len(slots), MAX_SLOTS):
            some = slice(start, start + MAX_SLOTS) if len(slots) > MAX_SLOTS else slice(None)
            data = [
                own.to_bytes(
                    layer, [{name: part[some] for name, part in planes.items()} for planes in device]
                )
                for own, device in zip(self._devices, parts, strict=True)
            ]
            self._ask(Kind.SCATTER, b"".join([layer_slots_message(layer, slots[some]), *data]))

    # Messages

    def _send(self, kind: Kind, payload: bytes = b"") -> None:
        if self.failure is not None:
            raise self.failure
        try:
            self._channel.send(kind, payload)
        except OSError as error:
            raise self._lose(str(error)) from error

    def _send_json(self, kind: Kind, **fields: Any) -> None:
        self._send(kind, json.dumps(fields).encode())

    def _ask(self, kind: Kind, payload: bytes = b"") -> bytes:
        self._send(kind, payload)
        answer, data = self._unless_lost(self._answers.get())
        if answer == Kind.REFUSED:
            fields = read_json(data)
            raise DeviceError(
                f"{self.host}: {fields.get('message')}", hint=str(fields.get("hint") or "") or None
            )
        if answer != Kind.RESULT:
            raise self._lose(f"it answered {answer.name}")
        return data

    def _unless_lost(self, found: tuple[Kind, bytes] | None) -> tuple[Kind, bytes]:
        if found is None:
            self._answers.put(None)  # for the next one who asks
            assert self.failure is not None
            raise self.failure
        return found

    def _listen(self) -> None:
        """The main function of the thread that receives messages."""
        try:
            while True:
                kind, payload = self._channel.receive()
                self.heard = time.monotonic()
                match kind:
                    case Kind.PONG:
                        pass
                    case Kind.ADDRESS:
                        self._on_address(*read_address(payload))
                    case Kind.PROGRESS:
                        fields = read_json(payload)
                        self.progress = int(fields["done"]), int(fields["total"])
                    case Kind.FAILED:
                        fields = read_json(payload)
                        self.is_consequence = fields.get("is_consequence") is True
                        self._lose(str(fields.get("message")), hint=str(fields.get("hint") or "") or None)
                        return
                    case Kind.READY | Kind.REFUSED | Kind.RESULT:
                        self._answers.put((kind, payload))
                    case _:
                        raise ProtocolError(f"a message of kind {kind.name}")
        except EOFError:
            self._lose("its connection has ended")
        except Exception as error:
            self._lose(str(error))

    def _lose(self, why: str, hint: str | None = None) -> MotleyError:
        """Notes that the worker is lost, once. Returns the first reason."""
        with self._lock:
            if self.failure is None:
                self.failure = LostWorkerError(self.host, why, hint=hint)
                self._answers.put(None)
                is_first = True
            else:
                is_first = False
        if is_first and not self._is_closed:
            self._on_loss(self.failure)
        self._channel.close()
        return self.failure


def connect(host: str, secret: bytes) -> Channel:
    """A connection to a worker, after the handshake. DeviceError, with the host's name, if there is none."""
    address, port = parse_address(host)
    try:
        connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
    except OSError as error:
        raise DeviceError(
            f"no worker answers at {host}: {error.strerror or error}",
            hint=f"start one there: motley worker --listen {host}",
        ) from error
    try:
        channel = call(connection, secret)
    except (EOFError, OSError) as error:
        connection.close()
        raise DeviceError(f"{host} has ended the connection: {error}") from error
    except ProtocolError as error:
        connection.close()
        raise DeviceError(f"{host}: {error.message}", hint=error.hint) from error
    connection.settimeout(None)
    # A stopped worker does not read: a send must not wait longer than a ping.
    timeout = struct.pack("ll", int(SILENT_SECONDS), 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
    return channel


def describe_host(host: str, secret: bytes) -> list[DeviceInfo]:
    """The devices of a worker."""
    channel = connect(host, secret)
    try:
        channel.settimeout(CONNECT_SECONDS)
        channel.send(Kind.DESCRIBE)
        kind, payload = channel.receive()
        if kind != Kind.RESULT:
            raise DeviceError(f"{host} does not say which devices it has")
        found = read_json(payload)["devices"]
        return [DeviceInfo(**{**device, "device": f"{device['device']}@{host}"}) for device in found]
    except (EOFError, OSError, KeyError, TypeError, MotleyError) as error:
        raise DeviceError(f"{host} does not say which devices it has: {error}") from error
    finally:
        channel.close()


def _require_one_network(workers: Sequence[RemoteWorker]) -> None:
    """All processes connect with each other, so an address of this machine alone may not be among others."""
    inner = [worker.host for worker in workers if is_loopback(worker.local_address)]
    if inner and len(inner) < len(workers):
        raise DeviceError(
            f"the worker {inner[0]} cannot be reached from the other hosts",
            hint="name it by this machine's address on their network",
        )


class Hosts:
    """All workers of a crew. The engine's thread calls its methods; any thread may read `missing`."""

    def __init__(self, opening: Opening, plan: CachePlan, hosts: Sequence[str], secret: bytes) -> None:
        self.link = MeshLink(opening.owners)
        self._opening = opening
        self._hosts = tuple(hosts)
        self._secret = secret
        self._devices = [DeviceBytes(plan, device) for device in range(len(plan.heads))]
        self._is_demand_paged = plan.config.demand_paged
        self._book = AddressBook()
        self.workers: list[RemoteWorker] = []
        self.n_connections = 0  # how often the crew was connected; its cache is empty after each
        self.report_loss: Callable[[MotleyError], object] = lambda error: None  # called by any thread
        self.missing: str | None = None  # why the crew cannot be connected, after a loss
        self._is_connected = False
        self._can_shift = False
        self._stop = threading.Event()
        threading.Thread(target=self._watch, name="motley-heartbeat", daemon=True).start()

    @property
    def is_connected(self) -> bool:
        return self._is_connected and not any(worker.failure for worker in self.workers)

    def open(self) -> None:
        """Connects to all workers, which then begin to load."""
        self._disconnect()
        self._book = AddressBook()
        found: list[RemoteWorker] = []
        self.workers = found
        try:
            for rank, host in enumerate(self._hosts, 1):
                own = [self._devices[d] for d, owner in enumerate(self._opening.owners) if owner == rank]
                found.append(self._worker(host, own))
                found[-1].open(replace(self._opening, rank=rank))
            _require_one_network(found)
        except BaseException:
            self._disconnect()
            raise

    def connect(self, progress: Progress | None = None) -> None:
        """Waits until all workers have loaded, and connects all processes with each other."""

        def show() -> None:
            if progress is not None:
                progress(sum(w.progress[0] for w in self.workers), sum(w.progress[1] for w in self.workers))

        try:
            for worker in self.workers:
                worker.wait_ready(show)
            for worker in self.workers:
                worker.connect_mesh()
            mesh = Mesh(
                0,
                self._opening.owners,
                self.workers[0].local_address,
                self._publish,
                self._book.lookup,
                self._opening.wire,
                self._opening.backends,
            )
            self.link.connect(mesh)
            for worker in self.workers:
                worker.wait_ready()
        except BaseException as error:
            lost = None if isinstance(error, RefusedError) else self._named_failure(0)
            self._disconnect()
            raise (lost or error) from error
        self.n_connections += 1
        self._is_connected = True

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Breaks the crew off if a step fails within this context. Raises the cause: a lost worker, or the error."""
        try:
            yield
        except BaseException as error:
            lost = self._named_failure(_NAMING_SECONDS if isinstance(error, DeviceError) else 0)
            self._disconnect()
            raise (lost or error) from error

    def restore(self, wake: Callable[[], object]) -> None:
        """Connects the crew again, in a thread of its own and as often as it takes, then calls `wake`."""
        threading.Thread(target=self._restore, args=(wake,), name="motley-restore", daemon=True).start()

    def _restore(self, wake: Callable[[], object]) -> None:
        while not self._stop.is_set():
            try:
                self.open()
                self.connect()
            except MotleyError as error:
                if str(error) != self.missing:
                    _log.warning("%s", error)
                self.missing = str(error)
                self._stop.wait(RETRY_SECONDS)
            except BaseException:
                _log.exception("the crew was not connected")
                self._stop.wait(RETRY_SECONDS)
            else:
                self.missing = None
                if not self._stop.is_set():
                    wake()
                    return
        self._disconnect(is_final=True)

    def close(self) -> None:
        self._stop.set()
        self._disconnect(is_final=True)

    # Work for all workers

    def run(
        self,
        shape: BatchShape,
        batch: PlacedBatch,
        inputs: Mapping[str, torch.Tensor],
        copies: Sequence[BlockCopy],
    ) -> None:
        for worker in self.connected_workers():
            worker.run(shape, batch, inputs, copies)

    def store_random(self, batch: Sequence[CacheBatch]) -> None:
        for worker in self.connected_workers():
            worker.store_random(batch)

    def shift(self, shifts: Sequence[BlockShift]) -> None:
        for worker in self.connected_workers():
            worker.shift(shifts)

    def give_back(self, emptied: Sequence[Sequence[int]]) -> None:
        if self._is_demand_paged and any(emptied) and self.is_connected:
            for worker in self.workers:
                worker.give_back(emptied)

    def require_shift(self) -> None:
        if not self._can_shift and self.is_connected:
            for worker in self.workers:
                worker.require_shift()
            self._can_shift = True

    def connected_workers(self) -> list[RemoteWorker]:
        """All workers. LostWorkerError if one of them is lost."""
        if not self._is_connected:  # it may be that another thread is connecting them
            raise LostWorkerError(", ".join(self._hosts), self.missing or "it is not back yet")
        lost = self._named_failure(0)
        if lost is not None:
            self._disconnect()
            raise lost
        return self.workers

    # Connections

    def _worker(self, host: str, devices: Sequence[DeviceBytes]) -> RemoteWorker:
        def on_address(key: str, value: bytes) -> None:
            self._book.put(key, value)
            for other in self.workers:
                if other.host != host:
                    other.send_address(key, value)

        return RemoteWorker(host, self._secret, on_address, self._on_loss, devices)

    def _publish(self, key: str, value: bytes) -> None:
        for worker in self.workers:
            worker.send_address(key, value)

    def _on_loss(self, error: MotleyError) -> None:
        """A worker is lost: nothing may wait for it. Called by the threads that listen and watch."""
        self.link.abort()
        self._book.close()
        if self._is_connected:
            self.report_loss(error)

    def _named_failure(self, seconds: float) -> MotleyError | None:
        """The loss that a control connection reports within that time: a cause rather than a consequence."""
        end = time.monotonic() + seconds
        while True:
            lost = [worker for worker in self.workers if worker.failure is not None]
            causes = [worker.failure for worker in lost if not worker.is_consequence]
            if causes or time.monotonic() >= end:
                return next(iter(causes), lost[0].failure if lost else None)
            time.sleep(0.01)

    def _disconnect(self, *, is_final: bool = False) -> None:
        self._is_connected = False
        workers, self.workers = self.workers, []
        for worker in workers:
            if is_final:
                worker.close()
            else:
                worker.break_off()
        self._book.close()
        self.link.disconnect()

    def _watch(self) -> None:
        """The main function of the thread that pings workers."""
        while not self._stop.wait(PING_SECONDS):
            for worker in list(self.workers):
                worker.ping()
