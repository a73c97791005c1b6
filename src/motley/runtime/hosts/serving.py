"""The worker's side: waits for rank 0, runs what it is told, and waits for the next one.

A connection that fails (garbage, a wrong secret, another version, a model that is not here) is refused with a sentence
to the caller and one to the log. It never ends the worker.
"""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from motley.errors import ConfigError, DeviceError, MotleyError
from motley.runtime.device_names import is_loopback, join_address, parse_address
from motley.runtime.hosts.addresses import AddressBook, read_address, write_address
from motley.runtime.hosts.cache_bytes import DeviceBytes, split_bytes
from motley.runtime.hosts.link import MeshLink
from motley.runtime.hosts.mesh import Mesh, PeerLostError
from motley.runtime.hosts.messages import StepReader
from motley.runtime.hosts.offers import own_offers
from motley.runtime.hosts.opening import Opening, WorkerModel, describe
from motley.runtime.hosts.protocol import Channel, Kind, ProtocolError, answer, read_json
from motley.runtime.hosts.streaming import Fetch, Progress, Receive, StreamedModel, default_cache
from motley.runtime.inventory import inventory
from motley.runtime.worker import Worker

_log = logging.getLogger("motley.worker")
HANDSHAKE_SECONDS = 10.0
SILENT_SECONDS = 30.0  # rank 0 pings every second
_MAX_CONNECTIONS = 16  # during handshakes

_Messages = queue.SimpleQueue[tuple[Kind, bytes] | None]  # None: the connection has ended


class WorkerServer:
    """Listens for rank 0. Serves one crew at a time."""

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        secret: bytes = b"",
        *,
        models: Path | None = None,
        cache: Path | None = None,
        n_threads: int | None = None,
    ) -> None:
        """`listen`: address and port; port 0: a free one. `models`: a folder with model files. `cache`: a folder for
        parts of models that rank 0 sends.
        """
        host, port = parse_address(listen)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            if not secret and not is_loopback(str(found[4][0])):
                raise ConfigError(
                    f"a worker at {listen} can be reached from other machines, so it needs a secret",
                    hint="--secret-file FILE, the same on all hosts: openssl rand -hex 32 > FILE",
                )
            self._socket = socket.create_server(found[4][:2], family=found[0], backlog=16)
        except (OSError, UnicodeError) as error:  # UnicodeError: what cannot be a name
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot listen at {listen:.200}: {why}") from error
        self._secret = secret
        self._models = models
        self._cache = cache or default_cache()
        self._n_threads = n_threads
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._serving = threading.Lock()  # held by the thread that accepts connections
        self._busy = threading.Lock()  # held while a crew is served
        self._kept: tuple[Opening, WorkerModel, Worker, MeshLink] | None = None
        self._is_closed = False

    @property
    def address(self) -> str:
        return join_address(*self._socket.getsockname()[:2])

    def serve(self) -> None:
        """Serves until `close`, which another thread may call."""
        with self._serving:
            self._accept()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if not self._is_closed:
                    _log.warning("a connection was not accepted: %s", error)
                    time.sleep(0.1)  # for example, there are no file descriptors left
                continue
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._handshake, args=(connection,), daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in `accept`
        with self._serving:  # not under that thread: see Channel.close
            self._socket.close()

    def _handshake(self, connection: socket.socket) -> None:
        """Handshake and first message of a connection, in a thread of its own."""
        peer = "a connection"
        channel: Channel | None = None
        has_slot = True
        try:
            peer = join_address(*connection.getpeername()[:2])
            connection.settimeout(HANDSHAKE_SECONDS)
            channel = answer(connection, self._secret)
            kind, payload = channel.receive()
            self._slots.release()
            has_slot = False
            if kind == Kind.DESCRIBE:
                devices = [device.as_json() for device in inventory()]
                channel.send_json(Kind.RESULT, devices=devices, offers=own_offers())
            elif kind == Kind.OPEN:
                self._open(channel, peer, payload)
            else:
                raise ProtocolError(f"a first message of kind {kind.name}")
        except (EOFError, OSError) as error:
            _log.warning("%s: the connection has ended: %s", peer, error)
        except MotleyError as error:
            _log.warning("%s: refused: %s", peer, error)
        except Exception:
            _log.exception("%s: failed", peer)
        finally:
            if has_slot:
                self._slots.release()
            if channel is not None:
                channel.close()
            connection.close()

    def _open(self, channel: Channel, peer: str, payload: bytes) -> None:
        try:
            opening = Opening.from_json(read_json(payload))
        except MotleyError as error:
            channel.send_json(Kind.REFUSED, **describe(error))
            raise
        if not self._busy.acquire(timeout=HANDSHAKE_SECONDS / 2):
            busy = DeviceError("it serves another crew", hint="wait for its end, or start another worker")
            channel.send_json(Kind.REFUSED, **describe(busy))
            raise busy
        try:
            _log.info("%s: opens %s", peer, opening.model)
            is_over = _Session(self, channel, opening).run()
            if is_over:
                self.forget()
            _log.info("%s: %s", peer, "has closed" if is_over else "is lost")
        finally:
            self._busy.release()

    def load(
        self, opening: Opening, progress: Progress, fetch: Fetch, receive: Receive
    ) -> tuple[WorkerModel, Worker, MeshLink]:
        """The loaded model of an opening; the one that is loaded already, if it is the same.

        `fetch`, `receive`: for parts of a model that is not on this host.
        """
        if self._kept is not None and self._kept[0] == opening:
            return self._kept[1:]
        self.forget()
        if not opening.fingerprint.isalnum():
            raise ProtocolError("an opening whose fingerprint is no fingerprint")
        folder = self._cache / opening.fingerprint
        model = WorkerModel(opening, self._models, lambda: StreamedModel(folder, fetch, receive, progress))
        link = MeshLink(opening.owners)
        worker = Worker(
            model.split, model.backends, model.plan, n_threads=self._n_threads, progress=progress, link=link
        )
        self._kept = opening, model, worker, link
        return model, worker, link

    def forget(self) -> None:
        """Frees the loaded model."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept[2].close()


class _Session:
    """One crew, from its opening to its end."""

    def __init__(self, server: WorkerServer, channel: Channel, opening: Opening) -> None:
        self._server = server
        self._channel = channel
        self._opening = opening
        self._messages: _Messages = queue.SimpleQueue()
        self._pieces: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # of the model; None: no more
        self._book = AddressBook()
        self._link: MeshLink | None = None
        self._is_over = False  # rank 0 said goodbye

    def run(self) -> bool:
        """Serves the crew. Returns whether rank 0 has closed it; otherwise the connection was lost."""
        self._channel.settimeout(SILENT_SECONDS)
        listener = threading.Thread(target=self._listen, name="motley-control", daemon=True)
        listener.start()
        try:
            self._serve()
        except (EOFError, OSError) as error:
            _log.warning("the connection to rank 0 has ended: %s", error)
        finally:
            self._end()
            self._channel.close()
            listener.join()
        return self._is_over

    def _serve(self) -> None:
        try:
            model, worker, link = self._server.load(
                self._opening, self._show_progress, self._fetch, self._receive_piece
            )
        except BaseException as error:
            self._channel.send_json(Kind.REFUSED, **describe(error))
            if isinstance(error, MotleyError):
                _log.warning("refused: %s", error)
                return
            raise
        self._link = link
        self._channel.send(Kind.READY)
        handler = _Handler(self._channel, model, worker)
        while (message := self._messages.get()) is not None:
            try:
                if message[0] == Kind.CONNECT:
                    self._connect(link)
                else:
                    handler.handle(*message)
            except (EOFError, OSError):
                raise
            except BaseException as error:
                if self._book.is_closed:  # a consequence of the connection's end
                    return
                is_ours = not isinstance(error, MotleyError) or error.__cause__ is not None
                _log.warning("a step failed: %s", error, exc_info=is_ours)
                is_consequence = isinstance(error, PeerLostError)
                self._channel.send_json(Kind.FAILED, is_consequence=is_consequence, **describe(error))
                return

    def _connect(self, link: MeshLink) -> None:
        def publish(key: str, value: bytes) -> None:
            self._book.put(key, value)  # for other devices of this process
            self._channel.send(Kind.ADDRESS, write_address(key, value))

        opening, address = self._opening, self._channel.local_address
        lookup = self._book.lookup
        mesh = Mesh(
            *(opening.rank, opening.owners, address, publish, lookup),
            *(opening.wire, opening.backends, opening.crew.groups, opening.devices),
        )
        link.connect(mesh)
        self._channel.send(Kind.READY)

    def _listen(self) -> None:
        """The main function of the thread that receives messages: pings are answered while devices work."""
        try:
            while True:
                kind, payload = self._channel.receive()
                match kind:
                    case Kind.PING:
                        self._channel.send(Kind.PONG)
                    case Kind.ADDRESS:
                        self._book.put(*read_address(payload))
                    case Kind.PIECE:
                        self._pieces.put(payload)
                    case Kind.CLOSE:
                        self._is_over = True
                        return
                    case _:
                        self._messages.put((kind, payload))
        except (EOFError, OSError):
            pass
        except MotleyError as error:
            _log.warning("%s", error)
        finally:
            self._end()

    def _end(self) -> None:
        """Nothing may wait for rank 0 or its crew from now on. Called by both threads."""
        self._book.close()
        self._messages.put(None)
        self._pieces.put(None)
        if self._link is not None:
            self._link.abort()
            if threading.current_thread().name != "motley-control":
                self._link.disconnect()

    def _fetch(self, request: bytes) -> None:
        self._channel.send(Kind.FETCH, request)

    def _receive_piece(self) -> bytes:
        piece = self._pieces.get()
        if piece is None:
            raise EOFError("the connection was closed")
        return piece

    def _show_progress(self, done: int, total: int) -> None:
        self._channel.send_json(Kind.PROGRESS, done=done, total=total)


class _Handler:
    """Does what rank 0 asks of the devices."""

    def __init__(self, channel: Channel, model: WorkerModel, worker: Worker) -> None:
        self._channel = channel
        self._worker = worker
        takes_lists = all(backend.takes_lists for backend in model.backends.values())
        self._reader = StepReader(model.limits, as_lists=takes_lists)
        plan = model.plan
        self._devices = [DeviceBytes(plan, device) for device in worker.members]
        sizes = [group.n_blocks * plan.config.block_size for group in plan.groups]
        if plan.states is not None:
            sizes.append(plan.states.n_slots)
        self._n_slots = [sizes[group] for group in plan.group_of_layers()]

    def handle(self, kind: Kind, payload: bytes) -> None:
        worker, reader = self._worker, self._reader
        match kind:
            case Kind.RUN:
                worker.run(*reader.run(payload))
            case Kind.SHIFT:
                worker.shift(reader.shifts(payload))
            case Kind.GIVE_BACK:
                worker.give_back(reader.emptied(payload))
            case Kind.STORE_RANDOM:
                worker.store_random(reader.batches(payload))
            case Kind.GATHER:
                self._gather(payload)
            case Kind.SCATTER:
                self._scatter(payload)
            case Kind.MEMORY:
                cache = [(part.groups, part.resident) for part in worker.cache_bytes()]
                self._answer(json.dumps({"memory": worker.memory(), "cache": cache}).encode())
            case Kind.REQUIRE_SHIFT:
                self._require_shift()
            case _:
                raise ProtocolError(f"a message of kind {kind.name}")

    def _require_shift(self) -> None:
        try:
            self._worker.require_shift()
        except MotleyError as error:
            self._channel.send_json(Kind.REFUSED, **describe(error))
        else:
            self._answer()

    def _gather(self, payload: bytes) -> None:
        layer, slots, rest = self._reader.layer_slots(payload, self._n_slots)
        if rest:
            raise ProtocolError("bytes after the slots")
        parts = zip(self._devices, self._worker.gather(layer, slots), strict=True)
        self._answer(b"".join(own.to_bytes(layer, part) for own, part in parts))

    def _scatter(self, payload: bytes) -> None:
        layer, slots, data = self._reader.layer_slots(payload, self._n_slots)
        self._worker.scatter(layer, slots, split_bytes(self._devices, layer, len(slots), data))
        self._answer()

    def _answer(self, payload: bytes = b"") -> None:
        self._channel.send(Kind.RESULT, payload)
