"""Streams: server-sent events, written as the engine's messages come in.

A step's pieces are encoded and written by the callback that received them, so that no task is woken for a token. Where
a reader is behind, its pieces wait in the mailbox and are written together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from motley.server.engine_client import EngineClient
from motley.server.errors import ApiError
from motley.server.jobs import End, Event, Job
from motley.server.replies import Run, event, merged

BODY = "motley.body"  # in a scope: the Body of its reply
_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
)


class Body(Protocol):
    """Writes to a connection, past everything that looks at heads of replies."""

    has_left: bool
    on_left: Callable[[], None] | None  # called when the client leaves

    def hold_head(self) -> None:
        """The head of the reply, which is sent next, may wait for the first `write`."""
        ...

    def release_head(self) -> None: ...

    def write(self, data: bytes) -> bool:
        """False: the reader is behind; `drain` before the next write."""
        ...

    async def drain(self) -> None: ...


class Writer(Protocol):
    """Makes the bytes of one stream."""

    def begin(self, run: Run) -> bytes:
        """The events before the first token."""
        ...

    def write(self, events: list[Event]) -> bytes: ...

    def end(self) -> bytes:
        """The text after the last event."""
        ...


class EventStream(Response):
    """Server-sent events. The jobs are cancelled when the client leaves, and an error after the first byte becomes an
    event.
    """

    def __init__(
        self,
        run: Run,
        writer: Writer,
        *,
        on_error: Callable[[ApiError], bytes] = lambda error: event(error.body()),
    ) -> None:
        self.status_code = 200
        self.raw_headers = list(_HEADERS)
        self._run = run
        self._writer = writer
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: Body = scope[BODY]
        event_writer = _EventWriter(self._run, self._writer, body, self._on_error)
        body.on_left = event_writer.leave
        try:
            if body.has_left:
                return
            body.hold_head()
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            event_writer.start()
            last = await event_writer.done
            if last is not None:
                await send({"type": "http.response.body", "body": last, "more_body": False})
        except OSError:
            pass  # the connection is lost
        finally:
            body.on_left = None
            body.release_head()
            event_writer.stop()
            self._run.close()


class _EventWriter:
    """Writes a run's events. `done`: the last bytes of the stream, not written; None: the client has left."""

    def __init__(self, run: Run, writer: Writer, body: Body, on_error: Callable[[ApiError], bytes]) -> None:
        self.done: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._run = run
        self._mailbox = run.mailbox
        self._writer = writer
        self._body = body
        self._on_error = on_error
        self._is_fine = any(job.params.logprobs is not None for job in run.jobs)  # a chunk for each token
        self._draining: asyncio.Task[None] | None = None  # the reader is behind

    def start(self) -> None:
        self._mailbox.on_events = self.flush
        self._put(self._writer.begin(self._run))
        self.flush()

    def leave(self) -> None:
        self._finish(None)

    def stop(self) -> None:
        self._mailbox.on_events = None
        if self._draining is not None:
            self._draining.cancel()
        if not self.done.done():
            self.done.cancel()
        elif not self.done.cancelled():
            self.done.exception()  # read, also where the client left at the same time

    def flush(self) -> None:
        """Writes all events that have come, unless the reader is behind. An error ends this stream alone: the caller
        is reading a message of the engine.
        """
        if self._draining is not None or self.done.done():
            return
        try:
            data = self._encoded(events) if (events := self._mailbox.take_now()) else b""
            if self.done.done():
                return
            if self._mailbox.n_open:
                self._put(data)
            else:
                self._finish(data + self._writer.end())
        except Exception as error:
            if not self.done.done():
                self.done.set_exception(error)

    def _encoded(self, events: list[Event]) -> bytes:
        """The bytes of events; an error among them ends the stream."""
        if len(events) > 1:
            if not self._is_fine:
                events = merged(events)
            for index, each in enumerate(events):
                if isinstance(each, End) and each.error is not None:
                    return self._fail(events[:index], each.error)
        elif isinstance(events[0], End) and events[0].error is not None:
            return self._fail([], events[0].error)
        return self._writer.write(events)

    def _fail(self, before: list[Event], error: ApiError) -> bytes:
        self._finish(self._writer.write(before) + self._on_error(error))
        return b""

    def _put(self, data: bytes) -> None:
        if data and not self._body.write(data) and self._draining is None:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        await self._body.drain()
        self._draining = None
        self.flush()

    def _finish(self, last: bytes | None) -> None:
        if not self.done.done():
            self.done.set_result(last)


async def stream_of(
    request: Request, engine: EngineClient, jobs: list[Job], writer: Writer, **options: Any
) -> Response:
    """A stream that begins once the engine has accepted the jobs: what it refuses is a plain error."""
    run = Run(engine, jobs)
    body: Body = request.scope[BODY]
    if body.has_left:
        raise ClientDisconnect
    run.submit()
    body.on_left = run.leave
    try:
        for ticket in run.tickets:
            await ticket.accepted
    except BaseException:
        run.close()
        raise
    finally:
        body.on_left = None
    return EventStream(run, writer, **options)
