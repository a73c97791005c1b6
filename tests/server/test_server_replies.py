"""Mailboxes, merged pieces, and readers that do not read: without a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from motley.server.jobs import End, Mailbox, Piece, Progress
from motley.server.replies import EventStream, merged
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
        asyncio.get_running_loop().call_later(0.001, mailbox.put, Piece(0, "a", [1]))
        sizes = [len(await mailbox.take())]
        for event in (end(0), end(1)):
            mailbox.put(event)
        sizes += [len(await mailbox.take()), len(await mailbox.take())]
        return sizes

    assert asyncio.run(run()) == [1, 2, 0]


def test_frames_may_be_cut_anywhere() -> None:
    data = encode({"a": "é" * 10}) + encode({"b": [1]})
    frames = Frames()
    found = [message for i in range(len(data)) for message in frames.feed(data[i : i + 1])]
    assert found == [{"a": "é" * 10}, {"b": [1]}]


class _Run:
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_a_reader_that_takes_nothing_is_dropped_and_its_jobs_end() -> None:
    run = _Run()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()  # the client's window is full, for ever

    async def serve() -> None:
        stream = EventStream(run, chunks(), stalled_seconds=0.02)  # type: ignore[arg-type]
        await asyncio.wait_for(stream({}, receive, send), 60)

    asyncio.run(serve())
    assert run.is_closed
