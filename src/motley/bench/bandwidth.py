"""Measures the memory bandwidth of a crew's devices, which limits decode speed."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from motley.backends.cpu import is_available
from motley.backends.cpu.native import core
from motley.backends.cpu.patterns import measure
from motley.runtime.crew import Crew
from motley.split.placement import TENSOR

_REPETITIONS = 5  # the best one is reported
_CPU_BYTES = 256 * 2**20  # for each thread: far more than any cache
_GPU_BYTES = 4 * 2**30
_COLUMNS = (
    65536  # of the matrix that a thread reads: with long rows, the product reads several rows at a time
)


def read_bandwidth(crew: Crew, n_threads: int | None = None) -> float:
    """Bytes per second at which the crew can read weights; `n_threads` as in `motley.LLM`.

    Devices that split tensors (in tensor mode all, otherwise those of a group) read at the same time; groups, or single
    devices, read their shares one after the other. Virtual devices on the same hardware share its bandwidth.
    """
    threads = crew.threads(n_threads)
    names = ["cpu" if device.name.startswith("cpu") else device.name for device in crew.devices]
    n_cpu_threads = sum(n for n, name in zip(threads, names, strict=True) if name == "cpu")
    speeds = {
        name: cpu_bandwidth(n_cpu_threads) if name == "cpu" else gpu_bandwidth(name) for name in set(names)
    }
    if crew.mode == TENSOR:
        return sum(speeds.values())
    total, seconds = sum(crew.shares), 0.0
    for members in crew.groups or [(device,) for device in range(len(crew))]:
        share = float(sum(crew.shares[device] for device in members) / total)
        seconds += share / sum(speeds[name] for name in {names[device] for device in members})
    return 1 / seconds


def cpu_bandwidth(n_threads: int) -> float:
    """Bytes per second that `n_threads` threads read together, with the best read pattern. More threads than cores do
    not read faster.

    Products of float32 weights are timed, because they need the fewest operations per byte.
    """
    n_threads = min(n_threads, os.cpu_count() or 1)
    if not is_available():
        return _torch_bandwidth(n_threads)
    return max(measure(core.Pool(n_threads), "F32", n_bytes=n_threads * _CPU_BYTES).values())


def _torch_bandwidth(n_threads: int) -> float:
    """`cpu_bandwidth` without the native module: each thread reads its own matrix."""
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
    """Bytes per second that the GPU reads while it sums a large buffer, timed by CUDA events."""
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
            if i:  # the first run loads the kernel
                best = max(best, 4 * buffer.numel() / (begin.elapsed_time(end) / 1e3))  # milliseconds
        del buffer
        torch.cuda.empty_cache()  # the model needs this memory
    return best
