"""Session files: written beside their place and renamed, one part at a time; nothing else is opened or followed."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from motley.errors import CacheError
from motley.kvcache.session_file import Contents, Identity, SessionFile, write_session

IDENTITY = Identity("a model", "f16", "f16", 0, 0, n_layers=1, n_kv_heads=1, head_dim=64)
CONTENTS = Contents((1, 2, 3), (0,))
MIB = 1 << 20


def write(path: Path, *parts: bytes) -> int:
    return write_session(path, IDENTITY, CONTENTS, parts)


def test_what_was_written_is_read_part_by_part(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert write(path, b"abc", b"defg") == path.stat().st_size
    assert write(path, b"abc", b"de") == path.stat().st_size  # in the other's place
    file = SessionFile(path, IDENTITY)
    assert file.contents == CONTENTS
    assert (file.part(3), file.part(2)) == (b"abc", b"de")
    file.require_end()
    file.close()
    assert os.listdir(tmp_path) == ["s"]
    assert path.stat().st_mode & 0o077 == 0  # a conversation is nobody else's


def test_one_part_is_in_memory_at_a_time(tmp_path: Path) -> None:
    def parts() -> Iterator[bytes]:
        for i in range(64):
            yield bytes([i]) * MIB

    tracemalloc.start()
    write_session(tmp_path / "s", IDENTITY, CONTENTS, parts())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * MIB


def test_a_failure_between_parts_leaves_nothing(tmp_path: Path) -> None:
    def parts() -> Iterator[bytes]:
        yield b"abc"
        raise KeyboardInterrupt

    (tmp_path / "s").write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt):
        write_session(tmp_path / "s", IDENTITY, CONTENTS, parts())
    assert os.listdir(tmp_path) == ["s"]
    assert (tmp_path / "s").read_bytes() == b"before"


def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / f"s.{os.getpid()}.part").symlink_to(victim)  # a name that could be guessed
    write(tmp_path / "s", b"abc")
    link = tmp_path / "link"
    link.symlink_to(victim)
    with pytest.raises(CacheError, match="not a regular file"):
        write(link, b"abc")
    assert victim.read_bytes() == b"precious"
    assert link.is_symlink()


def test_pipes_devices_and_folders_are_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/null"), tmp_path):
        with pytest.raises(CacheError, match="not a regular file"):
            write(path, b"abc")
        with pytest.raises(CacheError, match=r"not a saved session|cannot be read"):
            SessionFile(path, IDENTITY)


@pytest.mark.parametrize("change", ["cut", "changed"])
def test_a_file_that_changes_after_its_check_is_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "s"
    size = write(path, b"a" * MIB, b"b" * MIB)
    file = SessionFile(path, IDENTITY)
    if change == "cut":
        os.truncate(path, size - MIB)
    else:
        with path.open("r+b") as other:
            other.seek(size - 1000)
            other.write(b"c")
    with pytest.raises(CacheError, match=f"was {change} while it was read"):  # noqa: PT012
        file.part(MIB)
        file.part(MIB)
        file.require_end()
    file.close()
