"""`Hosts`: all workers of a crew, on rank 0.

When one of them is lost, the connections between all processes are ended, so that no device waits for ever; the step
fails with a LostWorkerError that names the worker. The crew is connected again as a whole.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from motley.errors import DeviceError, LostWorkerError, MotleyError
from motley.kvcache.arena import CacheBatch
from motley.kvcache.sequences import BlockCopy, BlockShift
from motley.models import BatchShape
from motley.runtime.batch import Numbers, PlacedBatch
from motley.runtime.caching import CachePlan
from motley.runtime.device_names import is_loopback
from motley.runtime.hosts.addresses import AddressBook
from motley.runtime.hosts.cache_bytes import DeviceBytes
from motley.runtime.hosts.link import MeshLink
from motley.runtime.hosts.mesh import Mesh
from motley.runtime.hosts.opening import Opening
from motley.runtime.hosts.remote import RefusedError, RemoteWorker
from motley.runtime.hosts.streaming import ModelFiles
from motley.runtime.loading import Progress

_log = logging.getLogger("motley")
PING_SECONDS = 1.0
RETRY_SECONDS = 1.0  # between attempts to connect a crew again
_NAMING_SECONDS = 2.0  # time for the control connection to say why a step failed


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
        self._files = ModelFiles(Path(opening.model))
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
                self._opening.crew.groups,
                self._opening.devices,
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
        inputs: Mapping[str, Numbers],
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
        """The connections to all workers. LostWorkerError if one of them is lost."""
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

        return RemoteWorker(host, self._secret, on_address, self._on_loss, devices, self._files)

    def _publish(self, key: str, value: bytes) -> None:
        self._book.put(key, value)  # for other devices of this process
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
