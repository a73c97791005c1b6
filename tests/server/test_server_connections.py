"""Connections, paths, and messages between the processes: what costs each request time, and must still be right."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import WAIT, RunningServer
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from motley.engine.params import SamplingParams
from motley.server import http
from motley.server.engine_client import READY, EngineClient
from motley.server.http import ChunkedBody, CorkedTransport, without_upgrade
from motley.server.jobs import Job, Mailbox
from motley.server.replies import JSON, Run
from motley.server.routes import Routes
from motley.server.wire import Channel, Frames

STREAM = json.dumps({"prompt": "a", "max_tokens": 3, "stream": True}).encode()
WHOLE = json.dumps({"prompt": "a", "max_tokens": 3}).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(is_mock=True) as running:
        yield running.wait_until_ready()


def post(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", *headers, f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def talk(server: RunningServer, data: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT) as connection:
        connection.sendall(data)
        found = b""
        while part := connection.recv(65536):
            found += part
        return found


def test_requests_sent_together_are_answered_in_their_order(server: RunningServer) -> None:
    found = talk(server, post(STREAM) + post(WHOLE) + post(STREAM, "Connection: close"))
    first, second, third = found.split(b"HTTP/1.1 200 OK")[1:]
    for streamed in (first, third):
        assert streamed.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert streamed.count(b'"text":" ') == 3
    assert json.loads(second.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 3


def test_a_client_that_offers_http_2_is_answered_by_http_1(server: RunningServer) -> None:
    """As Java's does in its first request: the body must not be lost."""
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAB")
    found = talk(server, post(WHOLE, *upgrade) + post(WHOLE, "Connection: close"))
    assert found.count(b"HTTP/1.1 200 OK") == 2


def test_connections_that_ask_nothing_keep_nobody_out() -> None:
    """The server may open 100 files here."""
    with RunningServer("--few-files", is_mock=True) as server, ExitStack() as stack:
        server.wait_until_ready()
        host, port = server.url.removeprefix("http://").split(":")

        def connected() -> socket.socket:
            return stack.enter_context(socket.create_connection((host, int(port)), timeout=WAIT))

        working = connected()  # it is not idle
        working.sendall(post(json.dumps({"prompt": "a", "max_tokens": 20, "stream": True}).encode()))
        assert working.recv(9) == b"HTTP/1.1 "
        silent = [connected() for _ in range(150)]
        assert server.get("/health").status_code == 200
        with suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""
        found = b""
        while b"[DONE]" not in found:
            part = working.recv(65536)
            assert part
            found += part
        assert not any("Too many open files" in line for line in server.log)


def test_only_the_head_of_a_request_is_changed() -> None:
    body = b"{}\r\nUpgrade: h2c\r\n"
    assert without_upgrade(post(body, "upgrade:h2c")) == post(body, "Ignored:h2c")
    other = post(body, "Upgrade: websocket", "X-Upgrade: h2c")
    assert without_upgrade(other) == other


class _Transport:
    """Keeps what is written, one entry for each packet."""

    def __init__(self) -> None:
        self.packets: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.packets.append(data)

    def close(self) -> None:
        self.is_closed = True


def test_the_head_of_a_stream_travels_with_its_first_chunk() -> None:
    async def serve() -> None:
        transport = _Transport()
        corked = CorkedTransport(transport)  # type: ignore[arg-type]
        flow = SimpleNamespace(write_paused=False)
        body = ChunkedBody(SimpleNamespace(flow=flow, loop=asyncio.get_running_loop()), corked)  # type: ignore[arg-type]
        body.hold_head()
        corked.write(b"head;")
        assert transport.packets == []
        body.write(b"abc")
        body.write(b"d")
        assert transport.packets == [b"head;3\r\nabc\r\n", b"1\r\nd\r\n"]

    asyncio.run(serve())


def test_the_head_of_a_stream_does_not_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve() -> None:
        monkeypatch.setattr(http, "_HEAD_SECONDS", 0.0)
        transport = _Transport()
        corked = CorkedTransport(transport)  # type: ignore[arg-type]
        body = ChunkedBody(SimpleNamespace(flow=None, loop=asyncio.get_running_loop()), corked)  # type: ignore[arg-type]
        body.hold_head()
        corked.write(b"head")
        while not transport.packets:
            await asyncio.sleep(0)
        assert transport.packets == [b"head"]
        corked.cork()
        corked.write(b"last words")
        corked.close()
        assert transport.packets == [b"head", b"last words"]
        assert transport.is_closed

    asyncio.run(asyncio.wait_for(serve(), WAIT))


async def _ask(routes: Routes, method: str, path: str) -> tuple[int, bytes, dict[bytes, bytes]]:
    found: list[Any] = []

    async def send(message: Any) -> None:
        found.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"h")],
    }
    await routes(scope, receive, send)
    return found[0]["status"], found[1]["body"], dict(found[0]["headers"])


def test_paths_methods_and_parameters() -> None:
    async def echo(request: Request) -> Response:
        return JSON([request.method, request.path_params])

    routes = Routes()
    routes.add("GET", "/a", echo)
    routes.add("POST", "/a", echo)
    routes.add("POST", "/slots/{slot}", echo)

    async def check() -> None:
        assert (await _ask(routes, "GET", "/a"))[:2] == (200, b'["GET",{}]')
        assert (await _ask(routes, "HEAD", "/a"))[0] == 200
        assert (await _ask(routes, "POST", "/slots/7"))[:2] == (200, b'["POST",{"slot":"7"}]')
        assert (await _ask(routes, "GET", "/slots/7"))[0] == 405
        assert (await _ask(routes, "DELETE", "/a"))[0] == 405
        for path in ("/b", "/slots", "/slots/", "/slots/7/8", "//a", "", "/A"):
            assert (await _ask(routes, "POST", path))[0] == 404, path
        status, _, headers = await _ask(routes, "GET", "/a/")
        assert (status, headers[b"location"]) == (307, b"http://h/a")

    asyncio.run(check())


class _Sent:
    """A transport of the engine client that keeps the messages."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def write(self, data: bytes) -> None:
        self.messages += Frames().feed(data)

    def is_closing(self) -> bool:
        return False


def _client(sent: _Sent) -> EngineClient:
    client = EngineClient(Path("none"), {}, n_slots=8)
    client.state, client._transport = READY, sent  # type: ignore[assignment]
    return client


JOB = Job((1, 2), SamplingParams())


def test_jobs_that_come_together_share_a_message_and_cancellations_come_after_them() -> None:
    async def submit() -> None:
        sent = _Sent()
        client = _client(sent)
        tickets = [client.submit([JOB], Mailbox(1))[0] for _ in range(3)]
        assert sum(len(message["jobs"]) for message in sent.messages) < 3  # the rest comes with the next turn
        client.cancel(tickets[:1])
        assert [message["op"] for message in sent.messages][-1] == "cancel"
        jobs = [job["id"] for message in sent.messages[:-1] for job in message["jobs"]]
        assert jobs == [ticket.number for ticket in tickets]
        client.submit([JOB], Mailbox(1))
        await asyncio.sleep(0)
        assert len(sent.messages[-1]["jobs"]) == 1

    asyncio.run(submit())


def test_a_client_that_leaves_does_not_wait_for_the_engine_to_accept_its_jobs() -> None:
    async def leave() -> None:
        client = _client(_Sent())
        run = Run(client, [JOB, JOB])
        run.submit()
        run.leave()
        with pytest.raises(ClientDisconnect):
            await run.tickets[0].accepted
        client.receive({"op": "accepted", "ids": [ticket.number for ticket in run.tickets]})  # comes too late

    asyncio.run(asyncio.wait_for(leave(), WAIT))


def test_messages_of_the_engine_process_keep_their_order_and_are_drained() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    for number in range(100):
        channel.send({"number": number})
    channel.drain(WAIT)
    ours.settimeout(WAIT)
    frames, found = Frames(), []
    while len(found) < 100:
        found += list(frames.feed(ours.recv(65536)))
    assert [message["number"] for message in found] == list(range(100))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_process_that_cannot_speak_is_seen_to_end() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    channel.send({"number": object()})
    ours.settimeout(WAIT)
    assert ours.recv(1) == b""
