"""Frames between the front and the engine process: four bytes of length, then JSON. No pickle: plain data only."""

from __future__ import annotations

import queue
import socket
import threading
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
    """The engine process's end of the socket. `send` may be called from any thread, and waits for nothing: a thread of
    the channel encodes and sends. The engine's thread continues with its next step meanwhile.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        # Messages; an event is set when all before it is sent.
        self._unsent: queue.SimpleQueue[Message | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, name="motley-wire", daemon=True).start()

    def send(self, message: Message) -> None:
        """Sends a message after those before it. It must not change any more."""
        self._unsent.put(message)

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
        done = threading.Event()
        self._unsent.put(done)
        done.wait(timeout)

    def _send_all(self) -> None:
        """The channel's thread."""
        try:
            self._send_forever()
        except BaseException:  # a bug: an engine that can say nothing must not seem to be alive
            self._socket.shutdown(socket.SHUT_RDWR)
            raise

    def _send_forever(self) -> None:
        """Sends messages that wait together."""
        is_open = True
        while True:
            given = [self._unsent.get()]
            while not self._unsent.empty():
                given.append(self._unsent.get())
            data = b"".join([encode(message) for message in given if isinstance(message, dict)])
            if data and is_open:
                try:
                    self._socket.sendall(data)
                except OSError:  # the front has gone; `receive` ends, too
                    is_open = False
            for each in given:
                if isinstance(each, threading.Event):
                    each.set()
