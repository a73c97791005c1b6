"""Keys, hosts, origins, limits, file names, and bodies that nobody means well."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from serving import WAIT, RunningServer

HELLO = [{"role": "user", "content": "Hello"}]
BROKEN_CALL = {"id": None, "function": {"name": "f", "arguments": "{"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = str(tmp_path_factory.mktemp("slots"))
    with RunningServer("--local", "--slots", folder, is_mock=True) as running:
        yield running.wait_until_ready()


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    with RunningServer("--keys", is_mock=True) as running:
        yield running.wait_until_ready()


def raw(server: RunningServer, data: bytes) -> bytes:
    """What comes back for these bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while part := connection.recv(65536):
            found += part
        return found


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer key"},
        {"Authorization": "Bearer key-onee"},
        {"Authorization": "key-one"},
        {"Authorization": "Basic key-one"},
        {"X-Api-Key": ""},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer k\u00e9y".encode("latin-1").decode("latin-1")},
    ],
)
def test_without_a_key_there_is_nothing(locked: RunningServer, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/slots", "/metrics", "/props"):
        assert locked.get(path, headers=headers).status_code == 401
    reply = locked.post("/v1/completions", {"prompt": "Hi"}, headers=headers)
    assert reply.status_code == 401
    assert reply.json()["error"]["type"] == "authentication_error"
    assert locked.get("/health", headers=headers).status_code == 200


def test_each_key_opens_in_both_headers(locked: RunningServer) -> None:
    for headers in (
        {"Authorization": "Bearer key-one"},
        {"Authorization": "bearer key-two"},
        {"X-Api-Key": "key-two"},
    ):
        assert locked.get("/v1/models", headers=headers).status_code == 200


def test_the_key_is_not_in_the_log(locked: RunningServer) -> None:
    locked.get("/v1/models", headers={"Authorization": "Bearer key-one"})
    assert not any("key-one" in line for line in locked.log)


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", ""])
def test_a_page_that_rebinds_its_name_gets_nothing(server: RunningServer, host: str) -> None:
    assert server.get("/v1/models", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8080", "[::1]:8080", "localhost:1"])
def test_names_of_this_machine_are_good_hosts(server: RunningServer, host: str) -> None:
    assert server.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [
        ("http://localhost:3000", True),
        ("http://[::1]:3000", True),
        ("http://localhost.evil.com", False),
        ("http://notlocalhost", False),
        ("null", False),
        ("http://[", False),
    ],
)
def test_origins_are_compared_as_hosts(server: RunningServer, origin: str, is_allowed: bool) -> None:
    reply = requests.options(f"{server.url}/completion", headers={"Origin": origin}, timeout=WAIT)
    assert reply.status_code == 200
    assert reply.headers.get("Access-Control-Allow-Origin") == (origin if is_allowed else None)


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server: RunningServer) -> None:
    head = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n{"
    assert raw(server, head).startswith(b"HTTP/1.1 413")
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    chunked = b"POST /completion HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert b" 413 " in raw(server, chunked + chunk * 20)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health?" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-Many: x\r\n" * 10_000 + b"\r\n",
        b"this is no HTTP at all\r\n\r\n",
    ],
)
def test_heads_that_are_too_large_or_none(server: RunningServer, head: bytes) -> None:
    assert raw(server, head).startswith(b"HTTP/1.1 400")
    assert server.get("/health").status_code == 200


@pytest.mark.slow
def test_what_does_not_come_is_not_waited_for() -> None:
    with RunningServer("--hasty", is_mock=True) as hasty:
        hasty.wait_until_ready()
        host, port = hasty.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=WAIT) as connection:
            connection.sendall(b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            assert connection.recv(4096).startswith(b"HTTP/1.1 408")
        for begun in (b"", b"POST /completion HTTP/1.1\r\nHost: local"):
            with socket.create_connection((host, int(port)), timeout=WAIT) as connection:
                connection.sendall(begun)
                assert connection.recv(4096) == b""  # closed
        text = json.dumps({"content": "a b " * 110_000, "with_pieces": True}).encode()
        with socket.create_connection((host, int(port)), timeout=WAIT) as deaf:
            head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n\r\n"
            deaf.sendall(head.encode() + text)
            dropped = select.poll()
            dropped.register(deaf, select.POLLHUP | select.POLLERR)
            assert dropped.poll(1000 * WAIT)  # by the server, though nothing of its answer was read


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", "a\x00b", "x" * 200, ".hidden", "ä", 7]
)
@pytest.mark.parametrize("action", ["save", "restore"])
def test_slots_are_saved_by_name_only(server: RunningServer, action: str, name: Any) -> None:
    assert server.post(f"/slots/0?action={action}", {"filename": name}).status_code == 400


@pytest.mark.parametrize(
    "path", ["/slots/9?action=erase", "/slots/x?action=erase", "/slots/0?action=eat", "/slots/0"]
)
def test_slots_that_are_not_there(server: RunningServer, path: str) -> None:
    assert server.post(path, {}).status_code == 400


LONG = "word " * 200_000  # a megabyte


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": LONG}),
        ("/v1/completions", {"prompt": ["a", 5, LONG]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5}),
        ("/v1/embeddings", {"input": [LONG, "a"]}),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    reply = server.post(path, body)
    assert reply.status_code == 400
    assert "at least" in reply.json()["error"]["message"]  # so nothing was counted
    assert "exceeds the available context size" in reply.json()["error"]["message"]


def test_long_texts_become_tokens_and_text_again(server: RunningServer) -> None:
    tokens = server.ok("/tokenize", {"content": LONG[:200_000]})["tokens"]
    assert server.ok("/detokenize", {"tokens": tokens})["content"] == LONG[:200_000]


BODIES: list[bytes] = [
    b"",
    b"null",
    b"[]",
    b"7",
    b"{",
    b'{"prompt": ',
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b"[" * 100_000,
    b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    json.dumps({"prompt": {"prompt_string": 5}}).encode(),
    json.dumps({"prompt": [[]]}).encode(),
    json.dumps({"prompt": [1.5]}).encode(),
    json.dumps({"prompt": [True]}).encode(),
    json.dumps({"prompt": ["a"] * 1000}).encode(),
    json.dumps({"prompt": "a", "n_predict": "many"}).encode(),
    json.dumps({"prompt": "a", "n_predict": 1.5}).encode(),
    json.dumps({"prompt": "a", "temperature": "hot"}).encode(),
    json.dumps({"prompt": "a", "top_p": 7}).encode(),
    json.dumps({"prompt": "a", "stop": [1]}).encode(),
    json.dumps({"prompt": "a", "stop": ["x"] * 5000}).encode(),
    json.dumps({"prompt": "a", "logit_bias": [[1, 2, 3]]}).encode(),
    json.dumps({"prompt": "a", "logit_bias": {"5": "x"}}).encode(),
    json.dumps({"prompt": "a", "logit_bias": "x"}).encode(),
    json.dumps({"prompt": "a", "n_probs": 10**9}).encode(),
    json.dumps({"prompt": "a", "n": 10**9}).encode(),
    json.dumps({"prompt": "a", "seed": "x"}).encode(),
    json.dumps({"prompt": "a", "grammar": "(" * 10_000}).encode(),
    json.dumps({"prompt": "a", "json_schema": {"type": "array", "minItems": 10**12}}).encode(),
    json.dumps({"prompt": "a", "response_format": "json"}).encode(),
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_hostile_bodies_are_the_clients_errors(server: RunningServer, path: str, body: bytes) -> None:
    reply = requests.post(server.url + path, data=body, timeout=WAIT)
    assert reply.status_code in (400, 501), reply.text
    assert reply.json()["error"]["message"]
    assert server.get("/health").status_code == 200


CHATS: list[dict[str, Any]] = [
    {},
    {"messages": None},
    {"messages": {}},
    {"messages": [None]},
    {"messages": [{"role": "user", "content": {"a": 1}}]},
    {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
    {"messages": [{"role": "assistant", "tool_calls": "x"}]},
    {"messages": HELLO, "tools": "x"},
    {"messages": HELLO, "tools": [{}]},
    {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
    {"messages": HELLO, "tool_choice": "required"},
    {"messages": HELLO, "tool_choice": {"type": "function", "function": {"name": "ghost"}}},
    {"messages": HELLO, "chat_template_kwargs": {"messages": []}},
    {"messages": HELLO, "chat_template_kwargs": {"add_generation_prompt": False}},
    {"messages": HELLO, "chat_template_kwargs": {"x": "y" * 100_000}},
    {"messages": HELLO, "chat_template_kwargs": 5},
    {"messages": HELLO, "top_logprobs": 50, "logprobs": True},
    {"messages": HELLO, "stream_options": "x", "stream": True},
    {"messages": HELLO * 20_000},
]


@pytest.mark.parametrize("body", CHATS, ids=range(len(CHATS)))
def test_hostile_chats_are_the_clients_errors(server: RunningServer, body: dict[str, Any]) -> None:
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 400, reply.text


@pytest.mark.parametrize(
    "message",
    [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": None, "function": {"name": "f", "arguments": "{"}}],
        },
        {"role": "tool", "content": [{"type": "text", "text": "x"}], "tool_call_id": None},
        {"role": "developer", "content": "Be kind."},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": None, "unknown": {"x": 1}},
    ],
)
def test_what_real_clients_send_is_accepted(server: RunningServer, message: dict[str, Any]) -> None:
    body = {"model": "gpt-4", "messages": [*HELLO, message], "max_tokens": 2, "store": None, "new_field": []}
    server.ok("/v1/chat/completions", body)


def test_a_deep_body_is_refused(server: RunningServer) -> None:
    deep: Any = "x"
    for _ in range(500):
        deep = {"a": deep}
    reply = server.post("/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": {"x": deep}})
    assert reply.status_code == 400


def test_paths_that_are_not_there(server: RunningServer, tmp_path: Path) -> None:
    assert server.get("/v1/nothing").status_code == 404
    assert server.get("/v1/chat/completions").status_code == 405
    assert server.get("/../../etc/passwd").status_code == 404
    assert raw(server, b"GET /../front.py HTTP/1.1\r\nHost: localhost\r\n\r\n").startswith(b"HTTP/1.1 404")
