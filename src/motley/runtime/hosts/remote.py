"""`RemoteWorker`: rank 0's connection to one worker.

A worker is lost when its connection ends, when it reports a failure, or when it has not answered for some seconds.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from motley.errors import DeviceError, FailedWorkerError, LostWorkerError, MotleyError
from motley.kvcache.arena import CacheBatch
from motley.kvcache.sequences import BlockCopy, BlockShift
from motley.models import BatchShape
from motley.runtime.batch import Numbers, PlacedBatch
from motley.runtime.hosts.addresses import read_address, write_address
from motley.runtime.hosts.cache_bytes import DeviceBytes, split_bytes
from motley.runtime.hosts.calling import SILENT_SECONDS, connect
from motley.runtime.hosts.messages import (
    MAX_SLOTS,
    StepWriter,
    emptied_message,
    layer_slots_message,
    shifts_message,
)
from motley.runtime.hosts.opening import Opening
from motley.runtime.hosts.protocol import Kind, ProtocolError, read_json
from motley.runtime.hosts.streaming import ModelFiles
from motley.runtime.worker import CacheBytes


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
        files: ModelFiles,
    ) -> None:
        """`host`: address and port. `devices`: the sizes of the cache of each device of the worker. `files`: of the
        model, for a worker that has none.
        """
        self.host = host
        self.heard = time.monotonic()
        self.failure: MotleyError | None = None  # why it is lost
        self.is_consequence = False  # it failed only because another process was lost
        self.progress = (0, 0)  # bytes of weights that it has loaded, bytes in all
        self._on_address, self._on_loss = on_address, on_loss
        self._devices = devices
        self._files = files
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
        """Sends a ping. A worker that has sent nothing for SILENT_SECONDS is lost."""
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
        inputs: Mapping[str, Numbers],
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
        self._call(Kind.REQUIRE_SHIFT)

    def memory(self) -> tuple[list[dict[str, int]], list[CacheBytes]]:
        """Bytes by purpose, and of the cache, for each device."""
        fields = read_json(self._call(Kind.MEMORY))
        memory = [{str(k): int(v) for k, v in device.items()} for device in fields["memory"]]
        cache = [CacheBytes(tuple(map(int, groups)), int(resident)) for groups, resident in fields["cache"]]
        return memory, cache

    def gather(self, layer: int, slots: torch.Tensor) -> list[tuple[dict[str, torch.Tensor], ...]]:
        pieces = []
        for some in torch.split(slots.reshape(-1), MAX_SLOTS):
            data = self._call(Kind.GATHER, layer_slots_message(layer, some))
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
            self._call(Kind.SCATTER, b"".join([layer_slots_message(layer, slots[some]), *data]))

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

    def _call(self, kind: Kind, payload: bytes = b"") -> bytes:
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
            self._answers.put(None)  # for the next call
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
                    case Kind.FETCH:
                        self._channel.send(Kind.PIECE, self._files.answer(payload))
                    case Kind.PROGRESS:
                        fields = read_json(payload)
                        self.progress = int(fields["done"]), int(fields["total"])
                    case Kind.FAILED:
                        fields = read_json(payload)
                        self.is_consequence = fields.get("is_consequence") is True
                        kind_of_loss = LostWorkerError if self.is_consequence else FailedWorkerError
                        why, hint = str(fields.get("message")), str(fields.get("hint") or "") or None
                        self._lose(why, hint=hint, error=kind_of_loss)
                        return
                    case Kind.READY | Kind.REFUSED | Kind.RESULT:
                        self._answers.put((kind, payload))
                    case _:
                        raise ProtocolError(f"a message of kind {kind.name}")
        except EOFError:
            self._lose("its connection has ended")
        except Exception as error:
            self._lose(str(error))

    def _lose(
        self, why: str, hint: str | None = None, error: type[LostWorkerError] = LostWorkerError
    ) -> MotleyError:
        """Notes that the worker is lost, once. Returns the first reason."""
        with self._lock:
            if self.failure is None:
                self.failure = error(self.host, why, hint=hint)
                self._answers.put(None)
                is_first = True
            else:
                is_first = False
        if is_first and not self._is_closed:
            self._on_loss(self.failure)
        self._channel.close()
        return self.failure
