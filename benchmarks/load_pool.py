"""The load of `load`, from several processes: one process with 64 clients needs 10 ms only to connect them, and clients
of a real server are not one process.

Each worker process has its share of the clients and of the requests; all begin at the same word.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from load import Sample, load


class LoadPool:
    """Processes that run loads, one after another; they sleep in between."""

    def __init__(self, n_processes: int) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, __file__]
        self._workers = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=Path(__file__).parent)
            for _ in range(n_processes)
        ]

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        for worker in self._workers:
            _input(worker).close()
            worker.wait(30)

    def run(
        self, url: str, n_clients: int, n_requests: int, body: dict[str, Any], lengths: Sequence[int]
    ) -> tuple[list[Sample], float]:
        """As `load`: the samples, and the seconds from the first client's beginning to the last one's end."""
        n = min(len(self._workers), n_clients)
        workers = self._workers[:n]
        for index, worker in enumerate(workers):
            mine = list(range(index, n_requests, n))
            order = {
                "url": url,
                "n_clients": len(range(index, n_clients, n)),
                "body": body,
                "seeds": mine,
                "lengths": [lengths[number] for number in mine],
            }
            _say(worker, json.dumps(order))
        for worker in workers:
            assert _answer(worker) == "ready"
        for worker in workers:
            _say(worker, "go")
        results = [json.loads(_answer(worker)) for worker in workers]
        samples = [Sample(**sample) for result in results for sample in result["samples"]]
        return samples, max(r["ended"] for r in results) - min(r["began"] for r in results)


def _input(worker: subprocess.Popen[str]) -> IO[str]:
    assert worker.stdin is not None
    return worker.stdin


def _say(worker: subprocess.Popen[str], line: str) -> None:
    _input(worker).write(line + "\n")
    _input(worker).flush()


def _answer(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


def main() -> None:
    """A worker: an order, "go", the results."""
    for line in sys.stdin:
        order = json.loads(line)
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.perf_counter()  # the same clock in all processes
        samples, seconds = asyncio.run(
            load(
                order["url"],
                order["n_clients"],
                len(order["seeds"]),
                order["body"],
                lengths=order["lengths"],
                seeds=order["seeds"],
            )
        )
        result = {"began": began, "ended": began + seconds, "samples": [asdict(sample) for sample in samples]}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
