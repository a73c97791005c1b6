"""HTTP connections with limits that uvicorn does not have: on the size of a request's head, and the time for it."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from motley.server.settings import Limits


def protocol_with(limits: Limits) -> type[HttpToolsProtocol]:
    """The class of connections, for `uvicorn.Config(http=…)`."""

    class LimitedProtocol(HttpToolsProtocol):
        _n_head = 0
        _waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            self._n_head = 0
            self._wait_for_head()
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value))
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
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
