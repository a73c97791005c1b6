"""Clients that leave, at every stage; full queues. Only a cancellation ends the answers here."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from serving import WAIT, RunningServer

ENDLESS = {"prompt": "Once upon a time", "context_shift": True, "ignore_eos": True, "n_predict": -1}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "context_shift": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    flags = ("-c", "512", "-np", "2", "-b", "16", "-t", "1", "--metrics", "--max-queue", "2")
    with RunningServer(*flags) as running:
        yield running.wait_until_ready()


@pytest.fixture(autouse=True)
def idle(server: RunningServer) -> Iterator[None]:
    """Every test leaves the server without work."""
    yield
    wait_for(lambda: n_busy(server) == 0)


def wait_for(condition: Any) -> None:
    ends = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < ends, "it has not come"
        time.sleep(0.02)


def n_busy(server: RunningServer) -> int:
    return sum(slot["is_processing"] for slot in server.get("/slots").json())


def metric(server: RunningServer, name: str) -> float:
    (line,) = [line for line in server.get("/metrics").text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


def leave_after(server: RunningServer, path: str, body: dict[str, Any], condition: Any) -> None:
    """Sends a request, waits for the condition, and closes the connection."""
    data = requests.Request("POST", server.url + path, json=body).prepare().body
    assert isinstance(data, bytes)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        wait_for(condition)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", ENDLESS),
        ("/completion", ENDLESS | {"stream": True}),
        ("/v1/chat/completions", CHAT | {"n": 2}),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/messages", CHAT | {"max_tokens": 10**6, "stream": True}),
        ("/v1/responses", {"input": "Hi", "context_shift": True, "ignore_eos": True, "stream": True}),
    ],
)
def test_a_running_request_ends_with_its_client(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    before = metric(server, "motley:requests_cancelled_total")
    n_tokens = metric(server, "llamacpp:n_decode_total")
    leave_after(
        server,
        path,
        body,
        lambda: n_busy(server) and metric(server, "llamacpp:n_decode_total") > n_tokens + 2,
    )
    wait_for(lambda: n_busy(server) == 0)
    assert metric(server, "motley:requests_cancelled_total") == before + body.get("n", 1)


def test_a_prompt_that_is_being_computed_ends_with_its_client(server: RunningServer) -> None:
    body = ENDLESS | {"prompt": [5 + i % 90 for i in range(500)], "cache_prompt": False}
    leave_after(server, "/completion", body, lambda: n_busy(server) == 1)
    wait_for(lambda: n_busy(server) == 0)


def test_a_waiting_request_leaves_the_running_ones_alone(server: RunningServer) -> None:
    with (
        server.post("/completion", ENDLESS | {"stream": True}, stream=True) as first,
        server.post("/completion", ENDLESS | {"stream": True}, stream=True) as second,
    ):
        lines = first.iter_lines()
        next(lines)
        wait_for(lambda: n_busy(server) == 2)
        leave_after(server, "/completion", ENDLESS, lambda: metric(server, "llamacpp:requests_deferred") == 1)
        wait_for(lambda: metric(server, "llamacpp:requests_deferred") == 0)
        assert n_busy(server) == 2
        for _ in range(20):
            next(lines)  # the others go on
        assert second.status_code == 200


def test_a_full_queue_says_when_to_come_back(server: RunningServer) -> None:
    replies: list[requests.Response] = []

    def ask() -> None:
        replies.append(server.post("/completion", {"prompt": "Hi", "n_predict": 2}))

    with (
        server.post("/completion", ENDLESS | {"stream": True}, stream=True),
        server.post("/completion", ENDLESS | {"stream": True}, stream=True),
    ):
        wait_for(lambda: n_busy(server) == 2)
        waiting = [threading.Thread(target=ask) for _ in range(2)]
        for thread in waiting:
            thread.start()
        wait_for(lambda: metric(server, "llamacpp:requests_deferred") == 2)
        refused = server.post("/completion", {"prompt": "Hi", "n_predict": 2})
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) > 0
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert server.get("/health").status_code == 200
    for thread in waiting:
        thread.join(WAIT)
    assert [reply.status_code for reply in replies] == [200, 200]


def test_a_deaf_reader_does_not_hold_up_others(server: RunningServer) -> None:
    with server.post("/completion", ENDLESS | {"stream": True}, stream=True) as deaf:
        assert deaf.status_code == 200
        for _ in range(3):
            server.ok("/completion", {"prompt": "Hi", "n_predict": 4})
