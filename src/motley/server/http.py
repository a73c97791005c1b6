"""HTTP connections: what uvicorn does not have. Limits on the head of a request (its size, and the time for it) and on
readers that take nothing; and a way to write the chunks of a stream without a coroutine for each.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from motley.server.settings import Limits
from motley.server.streams import BODY

_UPGRADE = re.compile(rb"(\r\n)upgrade:(?=[ \t]*h2c[ \t]*(?:\r\n|$))", re.IGNORECASE)
_HEAD_SECONDS = 0.1  # that the head of a stream may wait for its first chunk


class CorkedTransport:
    """A transport whose writes can be held back, so that the head of a reply and its first chunk are one packet."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held: list[bytes] | None = None
        self.write: Callable[[bytes], None] = transport.write  # no call of ours in between, for each token

    def cork(self) -> None:
        """Holds back what is written from now on, until `uncork` or the end of the connection."""
        self._held = []
        self.write = self._held.append

    def uncork(self) -> None:
        """Writes what was held back."""
        if self._held is not None:
            held, self._held = b"".join(self._held), None
            self.write = self._transport.write
            if held:
                self._transport.write(held)

    def close(self) -> None:
        self.uncork()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class ChunkedBody:
    """The body of a streamed reply, in chunks. uvicorn's `send` must have begun the reply, and must end it."""

    __slots__ = ("_flow", "_late", "_loop", "_transport", "has_left", "on_left")

    def __init__(self, protocol: HttpToolsProtocol, transport: CorkedTransport) -> None:
        self.has_left = False
        self.on_left: Callable[[], None] | None = None
        self._flow = protocol.flow
        self._loop = protocol.loop
        self._transport = transport
        self._late: asyncio.TimerHandle | None = None

    def hold_head(self) -> None:
        """The reply's head waits for the first chunk, or for some tenths of a second: each packet wakes the client."""
        self._transport.cork()
        self._late = self._loop.call_later(_HEAD_SECONDS, self._transport.uncork)

    def release_head(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
            self._transport.uncork()

    def write(self, data: bytes) -> bool:
        """False: the connection's buffer is full; `drain` before the next write."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        if self._late is not None:
            self.release_head()
        return not self._flow.write_paused

    async def drain(self) -> None:
        await self._flow.drain()

    def leave(self) -> None:
        """The client has left."""
        self.has_left = True
        if self.on_left is not None:
            self.on_left()


def without_upgrade(data: bytes) -> bytes:
    """A request without its wish for HTTP/2: it is answered by HTTP/1.1. Java's client sends this wish with each first
    request, and the parser would drop the body.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(rb"\1Ignored:", head) + end + rest


def protocol_with(limits: Limits, max_connections: int) -> type[HttpToolsProtocol]:
    """The class of connections, for `uvicorn.Config(http=…)`. If there are more than `max_connections`, the one that
    has been idle for the longest time is closed. So connections that send nothing do not block others.
    """
    idle: dict[LimitedProtocol, None] = {}  # in the order in which they became idle

    class LimitedProtocol(HttpToolsProtocol):
        _n_head = 0
        _corked: CorkedTransport
        _waiting: asyncio.TimerHandle | None = None  # for the head of a request
        _blocked: asyncio.TimerHandle | None = None  # for the reader

        def connection_made(self, transport: Any) -> None:
            self._bodies: deque[ChunkedBody] = deque()  # of replies that are not complete
            self._corked = CorkedTransport(transport)
            super().connection_made(cast(asyncio.Transport, self._corked))
            # A writer learns at once that the reader is behind: what comes meanwhile is then written together.
            transport.set_write_buffer_limits(high=0)
            self._wait_for_head()
            idle[self] = None
            if len(self.connections) > max_connections:
                oldest = next(iter(idle))
                del idle[oldest]
                oldest.transport.abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(without_upgrade(data) if b"h2c" in data else data)

        def connection_lost(self, exc: Exception | None) -> None:
            idle.pop(self, None)
            self._stop_waiting()
            self._unblock()
            super().connection_lost(exc)
            for body in self._bodies:
                body.leave()

        def pause_writing(self) -> None:
            """The reader is behind. Closing would wait until it has taken the rest, so it is dropped in the end."""
            super().pause_writing()
            self._blocked = self.loop.call_later(limits.stalled_seconds, self._drop)

        def resume_writing(self) -> None:
            self._unblock()
            super().resume_writing()

        def _drop(self) -> None:
            connection = self.transport.get_extra_info("socket")
            with suppress(OSError):  # the kernel, too, forgets what was not taken
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()

        def _unblock(self) -> None:
            if self._blocked is not None:
                self._blocked.cancel()
                self._blocked = None

        def on_message_begin(self) -> None:
            self._n_head = 0
            self._wait_for_head()
            super().on_message_begin()
            body = ChunkedBody(self, self._corked)
            self._bodies.append(body)
            cast(dict[str, Any], self.scope)[BODY] = body

        def on_response_complete(self) -> None:
            self._bodies.popleft()
            super().on_response_complete()
            if not self._bodies and not self.transport.is_closing():
                idle[self] = None

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value))
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            idle.pop(self, None)
            self._stop_waiting()
            super().on_headers_complete()

        def _count(self, n_bytes: int) -> None:
            self._n_head += n_bytes
            if self._n_head > limits.head_bytes:
                raise ValueError("the head of the request is too large")  # the parser makes a 400 of it

        def _wait_for_head(self) -> None:
            self._stop_waiting()
            self._waiting = self.loop.call_later(limits.head_seconds, self._give_up)

        def _stop_waiting(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

        def _give_up(self) -> None:
            if self.transport is not None and not self.transport.is_closing():
                self.transport.close()

    return LimitedProtocol
