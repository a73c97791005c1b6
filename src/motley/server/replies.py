"""Replies: JSON at once, or server-sent events. A client that leaves ends its jobs, streamed or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from motley.server.engine_client import EngineClient, Ticket
from motley.server.errors import ApiError
from motley.server.jobs import End, Event, Job, Mailbox, Piece, Progress

T = TypeVar("T")

_OPTIONS = orjson.OPT_NON_STR_KEYS
DONE = b"data: [DONE]\n\n"


class JSON(Response):
    """A JSON reply."""

    media_type = "application/json"

    def __init__(
        self, content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(content, status_code, dict(headers or {}))

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, option=_OPTIONS)


def error_reply(error: ApiError) -> Response:
    return JSON(error.body(), error.status, error.headers)


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + orjson.dumps(data, option=_OPTIONS) + b"\n\n"


class Run:
    """The jobs of one HTTP request, from their submission to their end. Leaving the `async with` cancels the rest."""

    def __init__(self, engine: EngineClient, jobs: list[Job]) -> None:
        self.jobs = jobs
        self._engine = engine
        self._mailbox = Mailbox(len(jobs))
        self.tickets: list[Ticket] = []

    async def __aenter__(self) -> Run:
        """Waits until the engine has accepted all jobs; raises what it refuses."""
        self.tickets = self._engine.submit(self.jobs, self._mailbox)
        try:
            for ticket in self.tickets:
                await ticket.accepted
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels the jobs that still run. Calling it again does nothing."""
        self._engine.cancel(self.tickets)

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Everything that has come since the last time, until all jobs have ended. Raises a job's error."""
        is_fine = any(job.params.logprobs is not None for job in self.jobs)
        while events := await self._mailbox.take():
            if len(events) > 1 and not is_fine:
                events = merged(events)
            for index, each in enumerate(events):
                if isinstance(each, End) and each.error is not None:
                    yield events[:index]
                    raise each.error
            yield events

    async def collect(self) -> list[Answer]:
        """All answers, complete."""
        answers = [Answer() for _ in self.jobs]
        async for events in self.batches():
            for each in events:
                answers[each.choice].add(each)
        return answers


def merged(events: list[Event]) -> list[Event]:
    """The same with neighbouring pieces of an answer as one: a reader that is behind gets fewer, longer chunks."""
    found: list[Event] = []
    at: dict[int, int] = {}  # by choice: the place of its latest piece
    for each in events:
        if not isinstance(each, Piece):
            at.pop(each.choice, None)
            found.append(each)
        elif (place := at.get(each.choice)) is not None:
            before = found[place]
            assert isinstance(before, Piece)
            found[place] = Piece(each.choice, before.text + each.text, before.tokens + each.tokens)
        else:
            at[each.choice] = len(found)
            found.append(each)
    return found


class Answer:
    """One complete answer."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[Any] = []
        self._end: End | None = None

    def add(self, event: Event) -> None:
        if isinstance(event, Piece):
            self._texts.append(event.text)
            self.tokens += event.tokens
            self.logprobs += event.logprobs or ()
        elif isinstance(event, End):
            self._end = event
        else:
            assert isinstance(event, Progress)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def end(self) -> End:
        assert self._end is not None, "it is complete"
        return self._end


class EventStream(Response):
    """Server-sent events from a generator of bytes. The jobs are cancelled when the client leaves or takes nothing for
    too long, and an error after the first byte becomes an event.
    """

    def __init__(
        self,
        run: Run,
        chunks: AsyncIterator[bytes],
        *,
        on_error: Callable[[ApiError], bytes] = lambda error: event(error.body()),
        stalled_seconds: float = 120.0,
    ) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._run = run
        self._chunks = chunks
        self._on_error = on_error
        self._stalled_seconds = stalled_seconds
        self._since: float | None = None  # when the send began that still waits for the reader
        self._is_stalled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_left(receive, self._write(send))
        except (ClientDisconnect, OSError):
            pass
        except asyncio.CancelledError:
            if not self._is_stalled:
                raise
        finally:
            self._run.close()

    async def _write(self, send: Send) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        timer: asyncio.TimerHandle | None = None

        def look() -> None:
            """Ends the stream if the reader takes nothing. One timer for a stream: one for each send is slow."""
            nonlocal timer
            if self._since is not None and loop.time() - self._since > self._stalled_seconds:
                self._is_stalled = True
                assert task is not None
                task.cancel()
                return
            timer = loop.call_later(self._stalled_seconds / 4, look)

        look()
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            try:
                async for chunk in self._chunks:
                    if chunk:
                        self._since = loop.time()
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                        self._since = None
            except ApiError as error:
                await send({"type": "http.response.body", "body": self._on_error(error), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if timer is not None:
                timer.cancel()


async def until_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client leaves first, the work is cancelled and ClientDisconnect raised."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_has_left(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, watching):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task


async def _has_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answers_of(request: Request, engine: EngineClient, jobs: list[Job]) -> list[Answer]:
    """All answers, complete; the jobs are cancelled if the client leaves."""

    async def work() -> list[Answer]:
        async with Run(engine, jobs) as run:
            return await run.collect()

    return await until_left(request.receive, work())


async def stream_of(
    request: Request,
    engine: EngineClient,
    jobs: list[Job],
    chunks: Callable[[Run], AsyncIterator[bytes]],
    **options: Any,
) -> Response:
    """A stream that begins once the engine has accepted the jobs: what it refuses is a plain error."""
    run = Run(engine, jobs)
    await until_left(request.receive, _entered(run))
    return EventStream(run, chunks(run), **options)


async def _entered(run: Run) -> None:
    await run.__aenter__()


Handler = Callable[..., Awaitable[Response]]
