"""Mailboxes, merged pieces, and readers that do not read: without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from motley.server.errors import ApiError
from motley.server.jobs import End, Mailbox, Piece, Progress
from motley.server.replies import merged
from motley.server.streams import BODY, EventStream
from motley.server.wire import Frames, encode


def end(choice: int) -> End:
    return End(choice, "stop", None, 1, 0, 1, 0.0, 0.0, 0.0, 0, 0, 0, None)


def test_pieces_of_each_answer_are_merged_in_order() -> None:
    events: list[Any] = [
        Piece(0, "a", [1]),
        Piece(1, "x", [7]),
        Piece(0, "b", [2]),
        Progress(1, 4, 0, 2, 0.1),
        Piece(1, "y", [8]),
        end(0),
        end(1),
    ]
    found = merged(events)
    assert found[0] == Piece(0, "ab", [1, 2])
    assert [event.text for event in found if isinstance(event, Piece) and event.choice == 1] == ["x", "y"]
    assert [type(event).__name__ for event in found] == ["Piece", "Piece", "Progress", "Piece", "End", "End"]


def test_a_mailbox_gives_everything_and_then_its_end() -> None:
    async def run() -> list[int]:
        mailbox = Mailbox(2)

        def come() -> None:
            mailbox.put(Piece(0, "a", [1]))
            mailbox.wake()

        asyncio.get_running_loop().call_later(0.001, come)
        sizes = [len(await mailbox.take())]
        for event in (end(0), end(1)):
            mailbox.put_end(event)
        sizes += [len(await mailbox.take()), len(await mailbox.take())]
        return sizes

    assert asyncio.run(run()) == [1, 2, 0]


def test_frames_may_be_cut_anywhere() -> None:
    data = encode({"a": "é" * 10}) + encode({"b": [1]})
    frames = Frames()
    found = [message for i in range(len(data)) for message in frames.feed(data[i : i + 1])]
    assert found == [{"a": "é" * 10}, {"b": [1]}]


class _Run:
    """A run without an engine."""

    def __init__(self, n_jobs: int = 1) -> None:
        self.jobs: list[Any] = []
        self.mailbox = Mailbox(n_jobs)
        self.is_closed = False

    def come(self, *events: Any) -> None:
        for event in events:
            self.mailbox.put_end(event) if isinstance(event, End) else self.mailbox.put(event)
        self.mailbox.wake()

    def close(self) -> None:
        self.is_closed = True


class _Writer:
    def begin(self, run: Any) -> bytes:
        return b"begin "

    def write(self, events: list[Any]) -> bytes:
        if any(getattr(each, "text", "") == "bug" for each in events):
            raise ZeroDivisionError
        return b"".join(each.text.encode() if isinstance(each, Piece) else b" end" for each in events) + b";"

    def end(self) -> bytes:
        return b"done"


class _Connection:
    """The client's side. `is_open` cleared: its window is full."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.is_complete = False
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.has_left = False
        self.on_left: Callable[[], None] | None = None
        self.n_held = 0

    def leave(self) -> None:
        self.has_left = True
        if self.on_left is not None:
            self.on_left()

    def hold_head(self) -> None:
        self.n_held += 1

    def release_head(self) -> None:
        self.n_held = 0

    def write(self, data: bytes) -> bool:
        self.chunks.append(data)
        return self.is_open.is_set()

    async def drain(self) -> None:
        await self.is_open.wait()

    async def send(self, message: Any) -> None:
        if body := message.get("body"):
            self.chunks.append(body)
        self.is_complete |= message.get("more_body") is False

    async def receive(self) -> Any:
        raise AssertionError("the stream watches by another way")

    def stream(self, run: _Run, **options: Any) -> asyncio.Task[None]:
        stream = EventStream(run, _Writer(), **options)  # type: ignore[arg-type]
        return asyncio.create_task(stream({BODY: self}, self.receive, self.send))


async def turns() -> None:
    """Lets all tasks run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_pieces_are_written_by_the_call_that_brings_them() -> None:
    async def serve() -> None:
        run, connection = _Run(), _Connection()
        task = connection.stream(run)
        await turns()
        run.come(Piece(0, "a", [1]))
        assert connection.chunks == [b"begin ", b"a;"]  # no task has run since
        run.come(Piece(0, "b", [2]), end(0))
        await asyncio.wait_for(task, 60)
        assert connection.chunks[2:] == [b"b end;done"]  # one packet, with the end of the reply
        assert connection.is_complete
        assert run.is_closed

    asyncio.run(serve())


def test_a_slow_reader_gets_what_came_meanwhile_in_one_chunk() -> None:
    async def serve() -> None:
        run, connection = _Run(), _Connection()
        task = connection.stream(run)
        await turns()
        connection.is_open.clear()
        for text in "abc":
            run.come(Piece(0, text, [1]))
        await turns()
        assert connection.chunks == [b"begin ", b"a;"]
        connection.is_open.set()
        await turns()
        assert connection.chunks == [b"begin ", b"a;", b"bc;"]
        run.come(end(0))
        await asyncio.wait_for(task, 60)
        assert b"".join(connection.chunks) == b"begin a;bc; end;done"

    asyncio.run(serve())


def test_a_client_that_leaves_ends_its_jobs() -> None:
    async def serve() -> None:
        run, connection = _Run(), _Connection()
        task = connection.stream(run)
        await turns()
        connection.leave()
        await asyncio.wait_for(task, 60)
        assert run.is_closed
        run.come(Piece(0, "a", [1]))  # comes too late
        assert connection.chunks == [b"begin "]

    asyncio.run(serve())


def test_a_bug_in_one_writer_reaches_no_other_stream() -> None:
    async def serve() -> None:
        run, other, connection, beside = _Run(), _Run(), _Connection(), _Connection()
        task, going = connection.stream(run), beside.stream(other)
        await turns()
        run.come(Piece(0, "bug", [1]))  # raises nothing here: the engine's message is still being read
        other.come(Piece(0, "a", [1]), end(0))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(task, 60)
        await asyncio.wait_for(going, 60)
        assert run.is_closed
        assert beside.is_complete

    asyncio.run(serve())


def test_an_error_of_a_job_is_an_event_and_the_end() -> None:
    async def serve() -> None:
        run, connection = _Run(), _Connection()
        task = connection.stream(run, on_error=lambda error: error.message.encode())
        await turns()
        failed = replace(end(0), reason="failed", error=ApiError(503, "it is gone"))
        run.come(Piece(0, "a", [1]), failed)
        await asyncio.wait_for(task, 60)
        assert connection.chunks[1:] == [b"a;it is gone"]
        assert connection.is_complete

    asyncio.run(serve())
