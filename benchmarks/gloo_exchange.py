"""What one exchange of two processes by Gloo costs, without Motley's engine: both send and receive the same bytes.

Between exchanges each process works for a while, as the devices of a crew do. "one ahead": the receive of the next
exchange is posted after each one. "together": receives are posted for many exchanges at once, and Gloo's thread runs on
the caller's core while the caller waits (motley.runtime.hosts.gloo.LoopThreads).
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from datetime import timedelta
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from motley.runtime.hosts.gloo import LoopThreads, make_device

_N_TOGETHER = 33  # collectives of a llama-1b's step
_TAG = 1


def exchange(rank: int, store: Any, n_bytes: int, micros: float, n: int, *, together: bool) -> None:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=60)
    options._threads = 1
    device, threads = make_device("127.0.0.1")
    options._devices = [device]
    group = gloo(store, rank, 2, options)
    loops = LoopThreads(threads if together else ())
    given = torch.zeros(n_bytes // 4)
    buffers = [torch.empty_like(given) for _ in range(_N_TOGETHER)]
    sends: list[float] = []
    waits: list[float] = []
    before: Any = None
    n_ahead = _N_TOGETHER if together else 1
    began = time.perf_counter()
    posted: list[Any] = []
    for number in range(n):
        if not posted:
            ahead = range(number, min(number + n_ahead, n))
            posted = [group.recv([buffers[each % _N_TOGETHER]], 1 - rank, _TAG) for each in ahead]
        end = time.perf_counter() + micros * 1e-6
        while time.perf_counter() < end:
            pass
        start = time.perf_counter()
        loops.follow()
        sent = group.send([given], 1 - rank, _TAG)
        middle = time.perf_counter()
        posted.pop(0).wait()
        waits.append(time.perf_counter() - middle)
        sends.append(middle - start)
        if before is not None:
            before.wait()
        before = sent
    before.wait()
    each = (time.perf_counter() - began) / n * 1e6 - micros
    if rank == 0:
        way = "together" if together else "one ahead"
        print(
            f"{way:>9}, {micros:3.0f} µs of work: {each:4.0f} µs an exchange; mean and median of "
            f"send {mean(sends) * 1e6:.0f}, {median(sends) * 1e6:.0f}, wait {mean(waits) * 1e6:.0f}, "
            f"{median(waits) * 1e6:.0f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=8192)
    parser.add_argument("--work", default="0,400", help="microseconds between exchanges")
    parser.add_argument("--exchanges", type=int, default=990)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)  # of the second process
    flags = parser.parse_args()
    if flags.port is not None:
        run_all(1, flags.port, flags)
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    other = subprocess.Popen([sys.executable, "-m", "benchmarks", *sys.argv, "--port", str(port)])
    try:
        run_all(0, port, flags)
    finally:
        other.wait(60)


def run_all(rank: int, port: int, flags: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store: Any = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]
    for micros in map(float, flags.work.split(",")):
        for together in (False, True):
            own: Any = dist.PrefixStore(f"{micros} {together}", store)  # type: ignore[attr-defined]
            exchange(rank, own, flags.bytes, micros, flags.exchanges, together=together)


if __name__ == "__main__":
    main()
