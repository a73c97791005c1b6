"""TCP connections for short messages, one for each pair of devices in different processes.

Gloo's sender waits for its receiver, and each message wakes two threads of each process. Here a sender writes and
continues, and a receiver polls its connection: a message costs the link's latency and some microseconds. One thread of
each process uses a connection, that of the device, so messages need neither headers nor locks: their sizes and their
order follow from the plan.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from motley.errors import DeviceError

MAX_BYTES = 256 << 10  # of a message; longer ones go over Gloo
_CONNECT_SECONDS = 30.0
_SPIN_SECONDS = 0.0002  # longer waits sleep: what carries the message may need the core
_POLL_MS = 50
_TOKEN_BYTES = 32
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}sHH")  # the listener's token, the devices of a connection
_PORT = struct.Struct("<H")
_KEY = "motley/lines"

Publish = Callable[[str, bytes], None]
Lookup = Callable[[str], bytes]
Pair = tuple[int, int]  # this process's device, and another process's


class LineClosedError(Exception):
    """The other end, or this one, has closed the connection."""


class DirectLines:
    """The connections of one process."""

    def __init__(self, sockets: Mapping[Pair, socket.socket]) -> None:
        self._sockets = dict(sockets)
        self._is_aborted = False
        self._ending = threading.Lock()  # held while sockets are shut down or closed
        for own in self._sockets.values():
            own.setblocking(False)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def transfer(self, sends: Mapping[Pair, memoryview], receives: Mapping[Pair, memoryview]) -> None:
        """Sends and receives all bytes, in both directions at the same time. LineClosedError if that is impossible."""
        outgoing = [(self._sockets[pair], data) for pair, data in sends.items() if len(data)]
        incoming = [(self._sockets[pair], data) for pair, data in receives.items() if len(data)]
        end = time.perf_counter() + _SPIN_SECONDS
        try:
            while True:
                n_before = len(outgoing) + len(incoming)
                outgoing = [(own, rest) for own, data in outgoing if len(rest := data[_send(own, data) :])]
                incoming = [(own, rest) for own, data in incoming if len(rest := data[_receive(own, data) :])]
                if not outgoing and not incoming:
                    return
                if len(outgoing) + len(incoming) == n_before:
                    self._wait(outgoing, incoming, is_spinning=time.perf_counter() < end)
        except (OSError, ValueError) as error:  # ValueError: closed by another thread
            raise LineClosedError(str(error)) from error

    def _wait(
        self,
        outgoing: Sequence[tuple[socket.socket, memoryview]],
        incoming: Sequence[tuple[socket.socket, memoryview]],
        *,
        is_spinning: bool,
    ) -> None:
        if self._is_aborted:
            raise LineClosedError("aborted")
        if is_spinning:
            os.sched_yield()
            return
        poll = select.poll()
        for own, _ in outgoing:
            poll.register(own, select.POLLOUT)
        for own, _ in incoming:
            poll.register(own, select.POLLIN)
        poll.poll(_POLL_MS)

    def abort(self) -> None:
        """Makes transfers fail, those that wait included. May be called by any thread."""
        self._is_aborted = True
        with self._ending:
            for own in self._sockets.values():
                with suppress(OSError):
                    own.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connections. No transfer may be under way; another thread may be in `abort`."""
        self.abort()
        with self._ending:
            for own in self._sockets.values():
                own.close()


def _send(own: socket.socket, data: memoryview) -> int:
    try:
        return own.send(data)
    except (BlockingIOError, InterruptedError):
        return 0


def _receive(own: socket.socket, data: memoryview) -> int:
    try:
        n = own.recv_into(data)
    except (BlockingIOError, InterruptedError):
        return 0
    if n == 0:
        raise LineClosedError("the other end has closed the connection")
    return n


def open_lines(
    rank: int, owners: Sequence[int], address: str, publish: Publish, lookup: Lookup
) -> DirectLines | None:
    """Connects the devices of this process with those of all others. All processes call this at the same time.

    The process of the pair's second device connects to a listener of the first one's, with a random token that only
    the processes of the crew have got. None if rank 0's environment says so (MOTLEY_DIRECT_LINES=0).
    """
    pairs = [(a, b) for b in range(len(owners)) for a in range(b) if owners[a] != owners[b]]
    is_off = rank == 0 and os.environ.get("MOTLEY_DIRECT_LINES") == "0"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found: dict[Pair, socket.socket] = {}
    try:
        with socket.create_server((address, 0), family=family, backlog=len(pairs) + 64) as listener:
            token = secrets.token_bytes(_TOKEN_BYTES)
            port = listener.getsockname()[1]
            publish(f"{_KEY}/{rank}", b"" if is_off else _PORT.pack(port) + token + address.encode())
            listeners = {r: lookup(f"{_KEY}/{r}") for r in sorted(set(owners)) if r != rank}
            if is_off or (rank != 0 and not listeners[0]):
                return None
            for a, b in pairs:
                if owners[b] == rank:
                    found[b, a] = _connect(listeners[owners[a]], a, b)
            expected = {(a, b) for a, b in pairs if owners[a] == rank}
            _accept(listener, token, expected, found)
    except OSError as error:
        for own in found.values():
            own.close()
        raise DeviceError(f"the processes of the crew cannot reach each other: {error}") from error
    return DirectLines(found)


def _connect(listener: bytes, a: int, b: int) -> socket.socket:
    (port,) = _PORT.unpack_from(listener)
    token, address = listener[2 : 2 + _TOKEN_BYTES], listener[2 + _TOKEN_BYTES :].decode()
    own = socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
    own.sendall(_HELLO.pack(token, a, b))
    return own


def _accept(
    listener: socket.socket, token: bytes, expected: set[Pair], found: dict[Pair, socket.socket]
) -> None:
    """Accepts one connection for each of the expected pairs. Others are closed."""
    end = time.monotonic() + _CONNECT_SECONDS
    while expected:
        listener.settimeout(max(end - time.monotonic(), 0.001))
        own, _ = listener.accept()
        try:
            own.settimeout(max(min(end - time.monotonic(), 5.0), 0.001))
            hello = own.recv(_HELLO.size, socket.MSG_WAITALL)
            given, a, b = _HELLO.unpack(hello)
        except (OSError, struct.error):
            own.close()
            continue
        if hmac.compare_digest(given, token) and (a, b) in expected:
            expected.remove((a, b))
            found[a, b] = own
        else:
            own.close()
