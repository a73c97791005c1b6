"""Authenticated messages over a TCP connection.

Both sides prove that they know the secret, by HMAC-SHA256 of two random numbers, before anything else is read. Keys for
both directions follow from these numbers, and each message carries a MAC of its number in the order of messages, its
header and its payload: messages cannot be forged, changed, repeated or left out. They are not encrypted.

    caller → worker   magic, protocol, random number
    worker → caller   magic, protocol, random number, proof
    caller → worker   proof
    both ways         kind, length, payload, MAC
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import stat
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any

from motley.errors import ConfigError, DeviceError

PROTOCOL = 3
MAX_JSON = 64 << 10  # bytes
MAX_MESSAGE = 64 << 20
MIN_SECRET = 16  # bytes
_MAGIC = b"MOTLEYHS"
_HELLO = struct.Struct("<8sH32s")
_HEADER = struct.Struct("<II")  # kind, bytes of the payload
_MAC_BYTES = 16
_PROOF_BYTES = 32
_KEEP_ALIVE = ((socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1))


class Kind(IntEnum):
    """Kinds of messages. The answers of a worker begin at 64."""

    OPEN = 1  # JSON: what to run
    ADDRESS = 2  # a key and a value of the store by which processes find each other
    RUN = 3
    SHIFT = 4
    GIVE_BACK = 5
    STORE_RANDOM = 6
    GATHER = 7
    SCATTER = 8
    MEMORY = 9
    REQUIRE_SHIFT = 10
    CONNECT = 11  # now processes connect to each other
    PING = 12
    DESCRIBE = 13  # asks which devices a worker has
    CLOSE = 14  # rank 0 needs the worker no more
    PIECE = 15  # bytes of the model file: the answer to FETCH
    READY = 64  # the answer to OPEN and CONNECT
    REFUSED = 65  # JSON: message, hint. The answer to OPEN
    PROGRESS = 66  # JSON: bytes of weights that are loaded, bytes in all
    RESULT = 67  # the answer to GATHER, SCATTER, MEMORY, REQUIRE_SHIFT, DESCRIBE
    FAILED = 68  # JSON: message, hint. The crew has ended
    PONG = 69
    FETCH = 70  # asks for bytes of the model file, see streaming.py


class ProtocolError(DeviceError):
    """The other side of a connection said what it must not say."""


def read_secret(path: str | os.PathLike[str] | None) -> bytes:
    """The secret in a file, without white space around it; empty if there is no file."""
    if path is None:
        return b""
    try:
        mode = os.stat(path).st_mode
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"secret file {path}: {error.strerror}") from None
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        raise ConfigError(f"secret file {path} can be read by others", hint=f"chmod 600 {path}")
    if len(secret) < MIN_SECRET:
        raise ConfigError(
            f"secret file {path} has {len(secret)} bytes, but at least {MIN_SECRET} are needed",
            hint=f"openssl rand -hex 32 > {path}",
        )
    return secret


class Channel:
    """Messages over a connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self._connection = connection
        self._send_key, self._receive_key = send_key, receive_key
        self._n_sent = self._n_received = 0
        self._lock = threading.Lock()  # held while a thread sends
        self._receiving = threading.Lock()  # held while a thread receives

    def send(self, kind: Kind, payload: bytes | memoryview = b"") -> None:
        """Sends a message. OSError if the connection is closed."""
        assert len(payload) <= MAX_MESSAGE, (kind, len(payload))
        head = _HEADER.pack(kind, len(payload))
        with self._lock:
            number = struct.pack("<Q", self._n_sent)
            self._n_sent += 1
            mac = hmac.digest(self._send_key, b"".join((number, head, payload)), "sha256")[:_MAC_BYTES]
            self._connection.sendall(b"".join((head, payload, mac)))

    def send_json(self, kind: Kind, **fields: Any) -> None:
        self.send(kind, json.dumps(fields).encode())

    def receive(self) -> tuple[Kind, bytes]:
        """The next message. EOFError or OSError if the connection is closed, ProtocolError for a false message."""
        with self._receiving:
            return self._receive()

    def _receive(self) -> tuple[Kind, bytes]:
        head = _read(self._connection, _HEADER.size)
        kind, n_bytes = _HEADER.unpack(head)
        if n_bytes > MAX_MESSAGE:
            raise ProtocolError(f"a message of {n_bytes} bytes, but at most {MAX_MESSAGE} are allowed")
        payload = _read(self._connection, n_bytes)
        number = struct.pack("<Q", self._n_received)
        expected = hmac.digest(self._receive_key, b"".join((number, head, payload)), "sha256")[:_MAC_BYTES]
        if not hmac.compare_digest(_read(self._connection, _MAC_BYTES), expected):
            raise ProtocolError("a message has a false MAC: it was changed on its way")
        self._n_received += 1
        try:
            return Kind(kind), payload
        except ValueError:
            raise ProtocolError(f"a message of the unknown kind {kind}") from None

    def settimeout(self, seconds: float | None) -> None:
        """The time that a receive may wait for bytes."""
        self._connection.settimeout(seconds)

    @property
    def local_address(self) -> str:
        """This host's address in the connection."""
        return str(self._connection.getsockname()[0])

    @property
    def peer(self) -> str:
        host, port, *_ = self._connection.getpeername()
        return f"{host}:{port}"

    def close(self) -> None:
        """Ends the connection, also for threads that wait in `send` or `receive`. Returns when they have left.

        The descriptor must not be closed under them: the system gives its number to the next connection, and a
        thread that was about to read or write would do so there.
        """
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes them
        with self._lock, self._receiving:
            self._connection.close()


def call(connection: socket.socket, secret: bytes) -> Channel:
    """The caller's side of the handshake."""
    nonce = os.urandom(32)
    connection.sendall(_HELLO.pack(_MAGIC, PROTOCOL, nonce))
    theirs = _read_hello(connection)
    expected = _proof(secret, b"worker", nonce, theirs)
    if not hmac.compare_digest(_read(connection, _PROOF_BYTES), expected):
        connection.sendall(bytes(_PROOF_BYTES))
        raise ProtocolError(
            "the worker has another secret", hint="give both the same --secret-file, or none on one machine"
        )
    connection.sendall(_proof(secret, b"caller", nonce, theirs))
    return _channel(connection, secret, nonce, theirs, is_caller=True)


def answer(connection: socket.socket, secret: bytes) -> Channel:
    """The worker's side of the handshake."""
    nonce = os.urandom(32)
    theirs = _read_hello(connection, reply=_HELLO.pack(_MAGIC, PROTOCOL, nonce) + bytes(_PROOF_BYTES))
    connection.sendall(_HELLO.pack(_MAGIC, PROTOCOL, nonce) + _proof(secret, b"worker", theirs, nonce))
    if not hmac.compare_digest(_read(connection, _PROOF_BYTES), _proof(secret, b"caller", theirs, nonce)):
        raise ProtocolError("the caller has another secret")
    return _channel(connection, secret, theirs, nonce, is_caller=False)


def _read_hello(connection: socket.socket, reply: bytes = b"") -> bytes:
    """The other side's random number. `reply` is sent to a side with another protocol, so that it can report that."""
    magic, protocol, nonce = _HELLO.unpack(_read(connection, _HELLO.size))
    if magic != _MAGIC:
        raise ProtocolError("the other side is not Motley")
    if protocol != PROTOCOL:
        connection.sendall(reply)
        raise ProtocolError(
            f"the other side speaks protocol {protocol}, this is {PROTOCOL}",
            hint="install the same version of Motley on both sides",
        )
    return bytes(nonce)


def _proof(secret: bytes, role: bytes, caller_nonce: bytes, worker_nonce: bytes) -> bytes:
    return hmac.digest(secret, b"motley " + role + caller_nonce + worker_nonce, "sha256")


def _channel(
    connection: socket.socket, secret: bytes, caller: bytes, worker: bytes, *, is_caller: bool
) -> Channel:
    keys = [_proof(secret, role, caller, worker) for role in (b"caller key", b"worker key")]
    for option in _KEEP_ALIVE:
        connection.setsockopt(*option)
    return Channel(connection, *(keys if is_caller else reversed(keys)))


def _read(connection: socket.socket, n_bytes: int) -> bytes:
    data = bytearray(n_bytes)
    view, n_read = memoryview(data), 0
    while n_read < n_bytes:
        n_new = connection.recv_into(view[n_read:])
        if not n_new:
            raise EOFError("the connection was closed")
        n_read += n_new
    return bytes(data)


def read_json(payload: bytes) -> dict[str, Any]:
    """The fields of a JSON message. ProtocolError if it is too long or is no object."""
    if len(payload) > MAX_JSON:
        raise ProtocolError(f"a description of {len(payload)} bytes, but at most {MAX_JSON} are allowed")
    try:
        fields = json.loads(payload)
    except (ValueError, RecursionError):
        raise ProtocolError("a description that is not JSON") from None
    if not isinstance(fields, Mapping):
        raise ProtocolError("a description that is no JSON object")
    return dict(fields)
