"""Collectives of processes on one machine, in memory that all of them have mapped.

Each process has two slots, used in turn, and a counter of the parts that it has written. It writes its part of
exchange k to its slot k % 2, sets its counter to k + 1, and waits for the counters of all others. It writes to the same
slot again only after all counters have reached k + 2, and by then all processes have read the part of exchange k.

Counters are aligned 64-bit numbers, written after the data. That order is kept by x86 processors, so only these use it.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeGuard

import numpy as np
import numpy.typing as npt
import torch

FOLDER = Path("/dev/shm")
SLOT_BYTES = 1 << 20  # larger parts (of long prompts) go over Gloo
_LINE = 64  # bytes between counters: each has a cache line of its own
_TOKEN_BYTES = 32
_SPIN_SECONDS, _NAP_SECONDS = 0.005, 0.0001
_KEY = "motley/shared"

Publish = Callable[[str, bytes], None]
Lookup = Callable[[str], bytes]


def open_shared(rank: int, n_ranks: int, publish: Publish, lookup: Lookup) -> SharedSlots | None:
    """Memory that all processes have mapped; None if one of them cannot. All processes call this at the same time."""
    size = _LINE * (n_ranks + 1) + n_ranks * 2 * SLOT_BYTES
    if rank != 0:
        memory = _open(lookup(_KEY), size)
        return SharedSlots(memory, rank, n_ranks) if _agree(memory, rank, n_ranks, publish, lookup) else None
    path, memory = _create(size)
    try:
        token = b"" if memory is None else memory[:_TOKEN_BYTES]
        publish(_KEY, os.fsencode(path or "") + b"\0" + token)
        return SharedSlots(memory, rank, n_ranks) if _agree(memory, rank, n_ranks, publish, lookup) else None
    finally:
        if path is not None:
            path.unlink(missing_ok=True)  # whoever needs it has mapped it


def _agree(
    memory: mmap.mmap | None, rank: int, n_ranks: int, publish: Publish, lookup: Lookup
) -> TypeGuard[mmap.mmap]:
    """Whether all processes have mapped the memory."""
    publish(f"{_KEY}/{rank}", b"0" if memory is None else b"1")
    others = [lookup(f"{_KEY}/{other}") for other in range(n_ranks) if other != rank]
    return memory is not None and all(answer == b"1" for answer in others)


def _create(size: int) -> tuple[Path | None, mmap.mmap | None]:
    if platform.machine() != "x86_64" or not FOLDER.is_dir() or os.environ.get("MOTLEY_SHARED_MEMORY") == "0":
        return None, None
    path = FOLDER / f"motley-{secrets.token_hex(8)}"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(file, 0, size)  # a full disk of memory is an error here, not a signal later
            memory = mmap.mmap(file, size)
        finally:
            os.close(file)
    except OSError:
        path.unlink(missing_ok=True)
        return None, None
    memory[:_TOKEN_BYTES] = secrets.token_bytes(_TOKEN_BYTES)
    return path, memory


def _open(address: bytes, size: int) -> mmap.mmap | None:
    """The memory at rank 0's path, if it is the same memory: another machine may have such a file, too."""
    name, _, token = address.partition(b"\0")
    path = Path(os.fsdecode(name))
    if platform.machine() != "x86_64" or path.parent != FOLDER or len(token) != _TOKEN_BYTES:
        return None
    with suppress(OSError, ValueError):
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            if os.fstat(file).st_size == size:
                memory = mmap.mmap(file, size)
                if memory[:_TOKEN_BYTES] == token:
                    return memory
        finally:
            os.close(file)
    return None


class SharedSlots:
    """The slots and counters of all processes."""

    def __init__(self, memory: mmap.mmap, rank: int, n_ranks: int) -> None:
        self._rank, self._n_ranks = rank, n_ranks
        self._counters: npt.NDArray[np.int64] = np.frombuffer(memory, np.int64, n_ranks * _LINE // 8, _LINE)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._n_exchanges = 0
        self.is_aborted = False

    def exchange(self, data: torch.Tensor, n_values: dict[int, int]) -> dict[int, torch.Tensor] | None:
        """The parts of all other processes by rank. They may be read until the next call. None if this was aborted.

        `n_values`: the sizes of these parts.
        """
        number = self._n_exchanges
        self._n_exchanges += 1
        self._slot(self._rank, number, data.dtype, data.numel()).copy_(data)
        self._counters[self._rank * _LINE // 8] = number + 1
        for rank in range(self._n_ranks):
            if not self._wait(rank * _LINE // 8, number + 1):
                return None
        return {rank: self._slot(rank, number, data.dtype, n) for rank, n in n_values.items()}

    def _slot(self, rank: int, number: int, dtype: torch.dtype, n_values: int) -> torch.Tensor:
        start = _LINE * (self._n_ranks + 1) + (2 * rank + number % 2) * SLOT_BYTES
        return self._bytes[start : start + n_values * dtype.itemsize].view(dtype)

    def _wait(self, place: int, number: int) -> bool:
        """Waits for a counter; spins first, since the others are about to be ready. False: aborted."""
        counters = self._counters
        if counters[place] >= number:
            return True
        end = time.perf_counter() + _SPIN_SECONDS
        while counters[place] < number:
            if self.is_aborted:
                return False
            if time.perf_counter() > end:
                time.sleep(_NAP_SECONDS)
        return True
