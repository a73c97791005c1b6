"""Reads files into the system's page cache before they are used where they are mapped."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from threading import Thread
from typing import NamedTuple

_PIECE = 64 << 20  # bytes
_GAP = 1 << 20  # bytes between parts that are read, too
_MEMORY_SHARE = 0.5  # more is not read ahead: it would evict its own pages


class FileRange(NamedTuple):
    path: str
    start: int  # bytes
    stop: int


def read_ahead(ranges: Iterable[FileRange]) -> None:
    """Read these parts of files in the order of their addresses. Returns when they are in the page cache.

    They are sent to nowhere, which copies nothing. So Linux reads in large pieces, and keeps them on huge pages, if the
    file system has those. After the advice to read ahead (WILLNEED) it reads 8 MiB at most, on small pages; and pages
    that several threads read by using them are mostly small, too.
    """
    waiting = list(_joined(sorted(ranges)))
    if sys.platform != "linux" or not fits_memory(sum(stop - start for _, start, stop in waiting)):
        return
    for path, start, stop in waiting:
        # An error is found when a page is used.
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            _read(file.fileno(), start, stop)


def read_ahead_in_thread(ranges: Iterable[FileRange]) -> None:
    Thread(target=read_ahead, args=(list(ranges),), name="motley-read-ahead", daemon=True).start()


def _joined(ranges: list[FileRange]) -> Iterator[FileRange]:
    """The same with neighbours as one: pages become large as reading goes on in the order of addresses."""
    waiting: FileRange | None = None
    for each in ranges:
        if waiting and each.path == waiting.path and each.start <= waiting.stop + _GAP:
            waiting = FileRange(waiting.path, waiting.start, max(waiting.stop, each.stop))
        else:
            if waiting:
                yield waiting
            waiting = each
    if waiting:
        yield waiting


def _read(file: int, start: int, stop: int) -> None:
    with open(os.devnull, "wb", buffering=0) as nowhere:
        for at in range(start, stop, _PIECE):
            end = min(at + _PIECE, stop)
            if is_cached(file, end - 1):  # not the first byte, which a look at a file's header has read
                continue
            try:
                _send(file, at, end, nowhere.fileno())
            except OSError:  # this file system sends nothing: then the advice
                os.posix_fadvise(file, at, end - at, os.POSIX_FADV_WILLNEED)


def _send(file: int, start: int, stop: int, out: int) -> None:
    while start < stop and (n := os.sendfile(out, file, start, stop - start)):
        start += n


def is_cached(file: int, at: int) -> bool:
    """Whether the byte at this place is in the page cache, as far as the system tells."""
    no_wait = getattr(os, "RWF_NOWAIT", None)  # Python does not have it if it was built with an old C library
    if no_wait is None:
        return False
    try:
        return bool(os.preadv(file, [bytearray(1)], at, no_wait))
    except (OSError, NotImplementedError):  # not without waiting; or not on this system
        return False


def fits_memory(n_bytes: int) -> bool:
    return n_bytes <= _MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
