"""Replies at once, in JSON. A client that leaves ends its jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

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
        self.mailbox = Mailbox(len(jobs))
        self.tickets: list[Ticket] = []

    def submit(self) -> None:
        """Sends the jobs to the engine."""
        self.tickets = self._engine.submit(self.jobs, self.mailbox)

    async def __aenter__(self) -> Run:
        """Waits until the engine has accepted all jobs; raises what it refuses."""
        self.submit()
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

    def leave(self) -> None:
        """The client has left: stops waiting for the engine to accept the jobs."""
        for ticket in self.tickets:
            if not ticket.accepted.done():
                ticket.accepted.set_exception(ClientDisconnect())
                ticket.accepted.exception()  # read: only the first one is awaited

    def close(self) -> None:
        """Cancels the jobs that still run. Calling it again does nothing."""
        self._engine.cancel(self.tickets)

    async def collect(self) -> list[Answer]:
        """All answers, complete. Raises a job's error."""
        answers = [Answer() for _ in self.jobs]
        while events := await self.mailbox.take():
            for each in events:
                if isinstance(each, End) and each.error is not None:
                    raise each.error
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


async def until_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client leaves first, the work is cancelled and ClientDisconnect raised."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(has_left(receive))
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


async def has_left(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def answers_of(request: Request, engine: EngineClient, jobs: list[Job]) -> list[Answer]:
    """All answers, complete; the jobs are cancelled if the client leaves."""

    async def work() -> list[Answer]:
        async with Run(engine, jobs) as run:
            return await run.collect()

    return await until_left(request.receive, work())
