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
from motley.server.replies import Run, event, has_left, merged

BODY = "motley.body"  # in a scope: the Body of its reply


class Body(Protocol):
    """Writes to a connection, past everything that looks at heads of replies."""

    def write(self, data: bytes) -> bool:
        """False: the reader is behind; `drain` before the next write."""
        ...

    async def drain(self) -> None: ...


class Writer(Protocol):
    """Makes the bytes of one stream."""

    def begin(self, run: Run) -> bytes:
        """What comes before the first token."""
        ...

    def write(self, events: list[Event]) -> bytes: ...

    def end(self) -> bytes:
        """What comes after the last event."""
        ...


class EventStream(Response):
    """Server-sent events. The jobs are cancelled when the client leaves, and an error after the first byte becomes an
    event. `watching` is done when the client has left.
    """

    def __init__(
        self,
        run: Run,
        writer: Writer,
        watching: asyncio.Future[None],
        *,
        on_error: Callable[[ApiError], bytes] = lambda error: event(error.body()),
    ) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._run = run
        self._writer = writer
        self._watching = watching
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = _Pump(self._run, self._writer, scope[BODY], self._on_error)
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            pump.start()
            await asyncio.wait({pump.done, self._watching}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done.done():
                pump.done.result()
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            pass  # the connection is lost
        finally:
            pump.stop()
            self._run.close()
            self._watching.cancel()


class _Pump:
    """Writes a run's events. `done`: everything is written, or nothing more can be."""

    def __init__(self, run: Run, writer: Writer, body: Body, on_error: Callable[[ApiError], bytes]) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
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
            if events := self._mailbox.take_now():
                self._write(events)
            if not self._mailbox.n_open and not self.done.done():
                self._put(self._writer.end())
                self._finish()
        except Exception as error:
            if not self.done.done():
                self.done.set_exception(error)

    def _write(self, events: list[Event]) -> None:
        if len(events) > 1:
            if not self._is_fine:
                events = merged(events)
            for index, each in enumerate(events):
                if isinstance(each, End) and each.error is not None:
                    self._fail(events[:index], each.error)
                    return
        elif isinstance(events[0], End) and events[0].error is not None:
            self._fail([], events[0].error)
            return
        self._put(self._writer.write(events))

    def _fail(self, before: list[Event], error: ApiError) -> None:
        self._put(self._writer.write(before) + self._on_error(error))
        self._finish()

    def _put(self, data: bytes) -> None:
        if data and not self._body.write(data) and self._draining is None:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        await self._body.drain()
        self._draining = None
        self.flush()

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def stream_of(
    request: Request, engine: EngineClient, jobs: list[Job], writer: Writer, **options: Any
) -> Response:
    """A stream that begins once the engine has accepted the jobs: what it refuses is a plain error."""
    run = Run(engine, jobs)
    watching = asyncio.create_task(has_left(request.receive))
    try:
        run.submit()
        await _accepted(run, watching)
    except BaseException:
        watching.cancel()
        run.close()
        raise
    return EventStream(run, writer, watching, **options)


async def _accepted(run: Run, watching: asyncio.Task[None]) -> None:
    """Waits until the engine has accepted all jobs, or the client has left. Raises what the engine refuses."""
    pending: set[asyncio.Future[None]] = {ticket.accepted for ticket in run.tickets}
    while pending:
        done, pending = await asyncio.wait({*pending, watching}, return_when=asyncio.FIRST_COMPLETED)
        if watching in done:
            raise ClientDisconnect
        for accepted in done:
            accepted.result()
        pending.discard(watching)
