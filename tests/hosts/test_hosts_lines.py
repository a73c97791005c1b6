"""Direct lines between processes; here the processes are threads."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from motley.runtime.hosts import gloo, lines
from motley.runtime.hosts.addresses import AddressBook
from motley.runtime.hosts.lines import DirectLines, LineClosedError, Pair, open_lines


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """The results of functions that run at the same time; an exception is a result, too."""
    results: list[Any] = [None] * len(works)

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return results


def connected(owners: tuple[int, ...]) -> list[DirectLines]:
    book = AddressBook()
    ranks = range(max(owners) + 1)
    found = at_once(*((lambda r=r: open_lines(r, owners, "127.0.0.1", book.put, book.lookup)) for r in ranks))  # type: ignore[misc]
    assert all(isinstance(each, DirectLines) for each in found), found
    return found


def pair_of_lines() -> tuple[DirectLines, DirectLines]:
    a, b = connected((0, 1))
    return a, b


def test_each_pair_of_devices_has_a_line() -> None:
    """Devices 0 and 2 are of rank 0, device 1 of rank 1, device 3 of rank 2."""
    crew = connected((0, 1, 0, 2))
    pairs: list[set[Pair]] = [set(each._sockets) for each in crew]
    assert pairs == [{(0, 1), (2, 1), (0, 3), (2, 3)}, {(1, 0), (1, 2), (1, 3)}, {(3, 0), (3, 1), (3, 2)}]
    got = bytearray(3)
    assert at_once(
        lambda: crew[0].transfer({(2, 3): memoryview(b"abc")}, {}),
        lambda: crew[2].transfer({}, {(3, 2): memoryview(got)}),
    ) == [None, None]
    assert got == b"abc"
    for each in crew:
        each.close()


@pytest.mark.parametrize("n", [1, 100_000, 20_000_000])  # the last does not fit into the sockets' buffers
def test_both_ends_send_and_receive_at_the_same_time(n: int) -> None:
    a, b = pair_of_lines()
    got = bytearray(n), bytearray(n)
    sent = bytes(range(256)) * (n // 256 + 1)
    for _ in range(2):
        done = at_once(
            lambda: a.transfer({(0, 1): memoryview(sent[:n])}, {(0, 1): memoryview(got[0])}),
            lambda: b.transfer({(1, 0): memoryview(sent[1 : n + 1])}, {(1, 0): memoryview(got[1])}),
        )
        assert done == [None, None]
    assert got[1] == sent[:n]
    assert got[0] == sent[1 : n + 1]
    a.close()
    b.close()


def test_who_waits_notices_the_end() -> None:
    for end in ("abort", "close"):
        a, b = pair_of_lines()
        for ending in (a, b):
            waiting = b if ending is a and end == "close" else a
            found = at_once(
                lambda w=waiting: w.transfer({}, {next(iter(w._sockets)): memoryview(bytearray(1))}),
                lambda e=ending, name=end: getattr(e, name)(),
            )
            assert isinstance(found[0], LineClosedError)
        a.close()
        b.close()


def test_a_stranger_gets_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections without the token are closed, and those of the crew are made nevertheless."""
    book = AddressBook()
    accept, connect = lines._accept, lines._connect
    are_there = threading.Event()
    strangers: list[socket.socket] = []

    def visited(listener: socket.socket, token: bytes, expected: set[Pair], found: Any) -> None:
        for hello in (bytes(36), b"short", lines._HELLO.pack(bytes(32), 0, 1)) if expected else ():
            strangers.append(socket.create_connection(listener.getsockname(), timeout=60))
            strangers[-1].sendall(hello)
            strangers[-1].shutdown(socket.SHUT_WR)
        if expected:
            are_there.set()
        accept(listener, token, expected, found)

    def connect_later(*given: Any) -> socket.socket:
        assert are_there.wait(60)
        return connect(*given)

    monkeypatch.setattr(lines, "_connect", connect_later)
    monkeypatch.setattr(lines, "_accept", visited)
    found = at_once(
        lambda: open_lines(0, (0, 1), "127.0.0.1", book.put, book.lookup),
        lambda: open_lines(1, (0, 1), "127.0.0.1", book.put, book.lookup),
    )
    assert all(isinstance(each, DirectLines) for each in found), found
    for stranger in strangers:
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        stranger.close()
    for each in found:
        each.close()


def test_rank_0_decides_whether_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTLEY_DIRECT_LINES", "0")
    book = AddressBook()
    found = at_once(
        lambda: open_lines(0, (0, 1), "127.0.0.1", book.put, book.lookup),
        lambda: open_lines(1, (0, 1), "127.0.0.1", book.put, book.lookup),
    )
    assert found == [None, None]


@pytest.mark.skipif(not gloo._TASKS.exists(), reason="the system does not show threads")
def test_the_threads_of_a_gloo_device_are_known_and_give_way() -> None:
    before = set(os.listdir(gloo._TASKS))
    name = (gloo._TASKS / str(threading.get_native_id()) / "comm").read_text()
    device, threads = gloo.make_device("127.0.0.1")
    assert len(threads) == 1
    assert {str(thread) for thread in threads} <= set(os.listdir(gloo._TASKS)) - before
    assert (gloo._TASKS / str(threading.get_native_id()) / "comm").read_text() == name
    own = os.sched_getscheduler(0)
    loops = gloo.LoopThreads([*threads, 2**22 + 1])  # the last one does not exist
    assert os.sched_getscheduler(threads[0]) == os.SCHED_IDLE
    assert os.sched_getscheduler(0) == own
    cores, core = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    try:
        loops.follow()
    finally:
        os.sched_setaffinity(0, cores)
    assert os.sched_getaffinity(threads[0]) == {core}
    assert len(gloo.make_device("127.0.0.1")[1]) == 1  # beside the first one
    del device
