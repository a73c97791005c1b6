"""How fast a crew's devices read memory: the ceiling of decode speed."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from motley.runtime.crew import Crew
from motley.split.placement import TENSOR

_REPETITIONS = 5  # the best counts
_CPU_BYTES = 256 * 2**20  # for each thread: far more than any cache
_GPU_BYTES = 4 * 2**30
_COLUMNS = (
    65536  # of the matrix that a thread reads: with long rows, the product reads several of them at a time
)


def read_bandwidth(crew: Crew, n_threads: int | None = None) -> float:
    """Bytes per second at which the crew can read weights; `n_threads` as in `motley.LLM`.

    In tensor mode all devices read at the same time, otherwise one after the other, each its share. Virtual devices on
    one piece of hardware have its bandwidth together.
    """
    threads = crew.threads(n_threads)
    names = ["cpu" if device.name.startswith("cpu") else device.name for device in crew.devices]
    n_cpu_threads = sum(n for n, name in zip(threads, names, strict=True) if name == "cpu")
    speeds = {
        name: cpu_bandwidth(n_cpu_threads) if name == "cpu" else gpu_bandwidth(name) for name in set(names)
    }
    if crew.mode == TENSOR:
        return sum(speeds.values())
    shares = [float(share / sum(crew.shares)) for share in crew.shares]
    return 1 / sum(share / speeds[name] for share, name in zip(shares, names, strict=True))


def cpu_bandwidth(n_threads: int) -> float:
    """What `n_threads` threads read together, each from memory of its own; more of them than cores read no faster."""
    n_threads = min(n_threads, os.cpu_count() or 1)
    matrices = [torch.ones(_CPU_BYTES // 4 // _COLUMNS, _COLUMNS) for _ in range(n_threads)]
    ones = torch.ones(_COLUMNS)

    def read(matrix: torch.Tensor) -> None:
        torch.mv(matrix, ones)

    best = 0.0
    with ThreadPoolExecutor(n_threads, initializer=torch.set_num_threads, initargs=(1,)) as threads:
        list(threads.map(read, matrices))
        for _ in range(_REPETITIONS):
            started = time.perf_counter()
            list(threads.map(read, matrices))
            best = max(best, n_threads * _CPU_BYTES / (time.perf_counter() - started))
    return best


def gpu_bandwidth(name: str) -> float:
    """What the GPU reads while it sums up a large buffer, by its own clock."""
    with torch.cuda.device(name):
        n_free, _ = torch.cuda.mem_get_info()
        buffer = torch.ones(min(_GPU_BYTES, n_free // 2) // 4, device=name)
        best = 0.0
        for i in range(_REPETITIONS + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            buffer.sum()
            end.record()
            end.synchronize()
            if i:  # the first one loads the kernel
                best = max(best, 4 * buffer.numel() / (begin.elapsed_time(end) / 1e3))  # milliseconds
        del buffer
        torch.cuda.empty_cache()  # the model needs it
    return best
