from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from motley import page_cache
from motley.page_cache import FileRange, read_ahead

_is_cached = page_cache.is_cached
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads nothing on other systems")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The parts that are sent, in pieces of up to 400 bytes."""
    parts: list[tuple[int, int]] = []
    sendfile = os.sendfile

    def send(out: int, file: int, start: int, n: int) -> int:
        n = sendfile(out, file, start, n)
        parts.append((start, n))
        return n

    monkeypatch.setattr(os, "sendfile", send)
    monkeypatch.setattr(page_cache, "_PIECE", 400)
    monkeypatch.setattr(page_cache, "_GAP", 50)
    monkeypatch.setattr(page_cache, "is_cached", lambda file, at: False)
    return parts


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    return str(path)


def test_parts_are_read_in_the_order_of_addresses(file: str, sent: list[tuple[int, int]]) -> None:
    read_ahead([FileRange(file, 500, 1000), FileRange(file, 0, 100)])
    assert sent == [(0, 100), (500, 400), (900, 100)]


def test_neighbours_are_read_as_one_part(file: str, sent: list[tuple[int, int]]) -> None:
    read_ahead(
        [
            FileRange(file, 0, 100),
            FileRange(file, 20, 60),
            FileRange(file, 150, 300),
            FileRange(file, 400, 450),
        ]
    )
    assert sent == [(0, 300), (400, 50)]


def test_what_is_cached_is_not_read(
    file: str, sent: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "is_cached", lambda file, at: at == 799)
    read_ahead([FileRange(file, 0, 1000)])
    assert sent == [(0, 400), (800, 200)]


def test_a_byte_that_can_only_be_read_by_waiting_is_not_cached(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: list[int] = []

    def preadv(file: int, buffers: list[bytearray], at: int, flag: int) -> int:
        flags.append(flag)
        if at == 400:
            raise BlockingIOError
        return 1

    monkeypatch.setattr(os, "preadv", preadv)
    assert [page_cache.is_cached(0, at) for at in (0, 400, 800)] == [True, False, True]
    assert flags == [os.RWF_NOWAIT] * 3


def test_python_without_reads_that_do_not_wait_takes_nothing_as_cached(
    file: str, sent: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "is_cached", _is_cached)
    monkeypatch.delattr(os, "RWF_NOWAIT")
    read_ahead([FileRange(file, 0, 1000)])
    assert sent == [(0, 400), (400, 400), (800, 200)]


def test_where_nothing_can_be_sent_the_system_is_advised_and_other_files_are_read(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(300))
    advised: list[tuple[int, int]] = []

    def refuse(out: int, file: int, start: int, n: int) -> int:
        raise OSError(errno.EINVAL, "refused")

    monkeypatch.setattr(os, "sendfile", refuse)
    monkeypatch.setattr(page_cache, "is_cached", lambda file, at: False)
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, n, advice: advised.append((start, n)))
    read_ahead([FileRange(file, 100, 1000), FileRange(str(other), 0, 300)])
    assert advised == [(100, 900), (0, 300)]


def test_a_part_beyond_the_files_end_is_no_error(file: str, sent: list[tuple[int, int]]) -> None:
    read_ahead([FileRange(file, 900, 2000)])
    assert sent == [(900, 100), (1000, 0)] + [(at, 0) for at in (1300, 1700)]


def test_a_file_that_is_gone_is_no_error(tmp_path: Path, sent: list[tuple[int, int]]) -> None:
    read_ahead([FileRange(str(tmp_path / "gone"), 0, 10)])
    assert not sent


def test_more_than_half_of_the_memory_is_not_read(
    file: str, sent: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "_MEMORY_SHARE", 0.0)
    read_ahead([FileRange(file, 0, 1000)])
    assert not sent
