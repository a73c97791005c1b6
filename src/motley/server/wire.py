"""Frames between the front and the engine process: four bytes of length, then JSON. No pickle: plain data only."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import orjson

Message = dict[str, Any]

_LENGTH_BYTES = 4
MAX_FRAME = 2**30  # bytes; a longer one is a mistake of ours
_READ_BYTES = 2**18


def encode(message: Message) -> bytes:
    body = orjson.dumps(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class Frames:
    """Bytes in, messages out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete with `data`."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH_BYTES:
                length = int.from_bytes(self._buffer[start : start + _LENGTH_BYTES], "little")
                if length > MAX_FRAME:
                    raise ValueError(f"a frame of {length} bytes")
                end = start + _LENGTH_BYTES + length
                if len(self._buffer) < end:
                    return
                message = orjson.loads(memoryview(self._buffer)[start + _LENGTH_BYTES : end])
                start = end
                yield message
        finally:
            if start:
                del self._buffer[:start]


class Channel:
    """The engine process's end of the socket. `send` may be called from any thread, and never waits for the reader:
    what the socket does not take at once is sent by a thread of its own.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._has_unsent = threading.Condition(self._lock)
        self._is_closed = False
        threading.Thread(target=self._send_rest, name="motley-wire", daemon=True).start()

    def send(self, message: Message) -> None:
        data = memoryview(encode(message))
        with self._lock:
            if self._is_closed:
                return
            if not self._unsent:
                data = data[self._send_now(data) :]
            if data:
                self._unsent.append(data)
                self._has_unsent.notify()

    def receive(self) -> Iterator[Message]:
        """Messages until the other end closes."""
        frames = Frames()
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError:
                return
            if not data:
                return
            yield from frames.feed(data)

    def drain(self, timeout: float) -> None:
        """Waits until everything is sent, or for `timeout` seconds."""
        with self._lock:
            self._has_unsent.wait_for(lambda: self._is_closed or not self._unsent, timeout)

    def _send_now(self, data: memoryview) -> int:
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # the front has gone; `receive` ends, too
            self._is_closed = True
            return len(data)

    def _send_rest(self) -> None:
        while True:
            with self._lock:
                self._has_unsent.wait_for(lambda: self._unsent or self._is_closed)
                if self._is_closed:
                    return
                data = self._unsent[0]
            try:
                self._socket.sendall(data)
            except OSError:
                with self._lock:
                    self._is_closed = True
                    self._unsent.clear()
                    self._has_unsent.notify_all()
                return
            with self._lock:
                self._unsent.popleft()
                self._has_unsent.notify_all()
