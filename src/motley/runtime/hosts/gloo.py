"""Gloo's threads and sockets, and how its processes find each other over the control connections."""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

_TASKS = Path("/proc/self/task")  # Linux: a folder for each thread
_current_core = getattr(ctypes.CDLL(None), "sched_getcpu", None)  # None: the system does not tell
_LOOP_NAMES = ("motley-gloo", "gloo_tcp_loop")  # when it is created, and when it runs

Publish = Callable[[str, bytes], None]  # a key and its value, to all other processes
Lookup = Callable[[str], bytes]  # waits for another process's value


class ControlStore(dist.Store):  # type: ignore[misc, name-defined]
    """The store by which Gloo's processes find each other. Its values travel over the control connections."""

    def __init__(self, publish: Publish, lookup: Lookup) -> None:
        super().__init__()
        self._publish, self._lookup = publish, lookup
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._publish(key, self.values[key])

    def get(self, key: str) -> bytes:
        if key not in self.values:
            self.values[key] = self._lookup(key)
        return self.values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.values for key in keys)

    def has_extended_api(self) -> bool:
        return False


def make_device(address: str) -> tuple[Any, list[int]]:
    """Gloo's network device, and the system's ids of its threads; none where the system does not show them."""
    gloo: Any = dist.ProcessGroupGloo  # torch's stubs do not know its methods
    own = _TASKS / str(threading.get_native_id()) / "comm"
    try:
        before, name = _loops(), own.read_text().rstrip("\n")
        own.write_text(_LOOP_NAMES[0])  # new threads inherit it
    except OSError:
        return gloo.create_device(hostname=address), []
    try:
        return gloo.create_device(hostname=address), sorted(_loops() - before)
    finally:
        own.write_text(name)


class LoopThreads:
    """Gloo's threads beside the thread that calls Gloo: they run on its core, and only while it waits.

    The lowest nice value is not enough: the scheduler still runs such a thread for a time slice. It then holds, or
    polls for, a lock of Gloo that a thread in a call of Gloo needs, and one waits until the other's slice ends,
    milliseconds later. On another core, they would wait for a thread that computes there, though the caller's core is
    idle.
    """

    def __init__(self, threads: Sequence[int]) -> None:
        self._threads = threads
        self._core = -1
        for thread in threads:
            with suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))

    def follow(self) -> None:
        """Brings them to the core of the calling thread."""
        core = -1 if _current_core is None else _current_core()
        if core != self._core:
            self._core = core
            for thread in self._threads:
                with suppress(OSError, ValueError):
                    os.sched_setaffinity(thread, {core})


def _loops() -> set[int]:
    """The threads of all of Gloo's devices."""
    found = set()
    for task in _TASKS.iterdir():
        with suppress(OSError):  # it has ended
            if (task / "comm").read_text().strip() in _LOOP_NAMES:
                found.add(int(task.name))
    return found - {threading.get_native_id()}


def sockets_of(addresses: Any) -> list[socket.socket]:
    """Duplicates of the connected sockets of this process from or to the listeners whose addresses Gloo published."""
    found = []
    for name in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            own = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        if any(end in address for end in _ends(own) for address in addresses):
            found.append(own)
        else:
            own.close()
    return found


def _ends(own: socket.socket) -> list[bytes]:
    """Port and address of both ends of a connection, as they are in Gloo's addresses."""
    if own.family not in (socket.AF_INET, socket.AF_INET6):
        return []
    gap = b"" if own.family == socket.AF_INET else bytes(4)  # IPv6: the flow
    try:
        ends = own.getsockname(), own.getpeername()
    except OSError:  # not connected
        return []
    return [struct.pack(">H", port) + gap + socket.inet_pton(own.family, host) for host, port, *_ in ends]
