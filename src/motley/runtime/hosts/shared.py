"""Memory that all processes of a crew have mapped, on one machine.

It has two groups (csrc/shared_group.hpp): one of devices, where native programs do collectives and where messages
between devices are, and one of processes, for collectives that Python does.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from motley.backends import SharedGroup

FOLDER = Path("/dev/shm")
_TOKEN_BYTES = 32
_FIRST = 1 << 16  # bytes before the groups: the token, and room for a page of any size
_KEY = "motley/shared"

Publish = Callable[[str, bytes], None]
Lookup = Callable[[str], bytes]


class SharedGroups:
    """The groups of one process."""

    def __init__(self, file: int, owners: Sequence[int]) -> None:
        n_ranks = max(owners) + 1
        self.ranks = SharedGroup(file, _FIRST, n_ranks)
        self.devices = SharedGroup(file, _FIRST + SharedGroup.n_bytes(n_ranks), len(owners))

    def abort(self) -> None:
        self.ranks.abort()
        self.devices.abort()


def open_shared(rank: int, owners: Sequence[int], publish: Publish, lookup: Lookup) -> SharedGroups | None:
    """Groups of all processes; None if one of them cannot map the memory. All processes call this at the same time."""
    n_ranks = max(owners) + 1
    sizes = SharedGroup.n_bytes(n_ranks), SharedGroup.n_bytes(len(owners))
    size = _FIRST + sum(sizes) if all(sizes) else 0
    if rank != 0:
        file = _open(lookup(_KEY), size)
        return _agreed(file, rank, owners, publish, lookup)
    path, file, token = _create(size)
    try:
        publish(_KEY, os.fsencode(path or "") + b"\0" + token)
        return _agreed(file, rank, owners, publish, lookup)
    finally:
        if path is not None:
            path.unlink(missing_ok=True)  # all processes have mapped the file, and a mapping needs no name


def _agreed(
    file: int | None, rank: int, owners: Sequence[int], publish: Publish, lookup: Lookup
) -> SharedGroups | None:
    """The groups in the memory, if all processes have mapped it. Closes the file."""
    groups = None
    if file is not None:
        with suppress(OSError, RuntimeError):
            groups = SharedGroups(file, owners)
        os.close(file)
    publish(f"{_KEY}/{rank}", b"0" if groups is None else b"1")
    others = [lookup(f"{_KEY}/{other}") for other in range(max(owners) + 1) if other != rank]
    return groups if all(answer == b"1" for answer in others) else None


def _create(size: int) -> tuple[Path | None, int | None, bytes]:
    """Path and descriptor of a new file of memory, and the random token that it begins with."""
    if not size or not FOLDER.is_dir() or os.environ.get("MOTLEY_SHARED_MEMORY") == "0":
        return None, None, b""
    path = FOLDER / f"motley-{secrets.token_hex(8)}"
    token = secrets.token_bytes(_TOKEN_BYTES)
    file = None
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.posix_fallocate(file, 0, size)  # a full disk of memory is an error here, not a signal later
        os.pwrite(file, token, 0)
    except OSError:
        if file is not None:
            os.close(file)
        path.unlink(missing_ok=True)
        return None, None, b""
    return path, file, token


def _open(address: bytes, size: int) -> int | None:
    """A descriptor of rank 0's file, if it is the same memory: another machine may have such a file, too."""
    name, _, token = address.partition(b"\0")
    path = Path(os.fsdecode(name))
    if not size or path.parent != FOLDER or len(token) != _TOKEN_BYTES:
        return None
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except (OSError, ValueError):
        return None
    if os.fstat(file).st_size == size and os.pread(file, _TOKEN_BYTES, 0) == token:
        return file
    os.close(file)
    return None
