"""How fast this machine reads memory: the ceiling of decode speed."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch

_BYTES = 256 * 2**20  # for each thread: far more than any cache
_REPETITIONS = 5


def read_bandwidth(n_threads: int) -> float:
    """Bytes per second that `n_threads` threads read together, each from memory of its own; the best of a few tries."""
    buffers = [torch.ones(_BYTES // 8, dtype=torch.int64) for _ in range(n_threads)]

    def read(buffer: torch.Tensor) -> None:
        buffer.sum()

    best = 0.0
    with ThreadPoolExecutor(n_threads, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        list(threads.map(read, buffers))
        for _ in range(_REPETITIONS):
            started = time.perf_counter()
            list(threads.map(read, buffers))
            best = max(best, n_threads * _BYTES / (time.perf_counter() - started))
    return best
