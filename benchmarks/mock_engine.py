"""An engine process without a model, for the server's tests and benchmarks: it speaks the wire protocol, and every step
gives each request one token.

Started by the server's front in place of the engine process: `mock_engine.py [--steps-per-second N] SOCKET`. With
`--step-ms 1:2,64:7` a step takes 2 ms with one request and 7 ms with 64, and in between what lies between. A prompt may
be an order: token 7 alone ends the process at once, token 8 after the next step, token 9 at the first start only
(a file named by MOCK_DIED remembers it).
"""

from __future__ import annotations

import argparse
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from motley.server.wire import Channel

N_CTX = 4096
_ASLEEP = 0.001  # seconds between two steps: the second one did not follow at once
PIECES = [" the", " fox", " sat", " on", " a", " red", " kite", "."]


class MockEngine:
    """All requests advance by one token a step."""

    def __init__(self, channel: Channel, step_seconds: Callable[[int], float]) -> None:
        """`step_seconds`: of a step with so many requests."""
        self._channel = channel
        self._step_seconds = step_seconds
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._requests: dict[int, dict[str, Any]] = {}
        self._n_steps = 0
        self._ended = 0.0  # when the latest step did, or will

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            while not (self._requests and self._inbox.empty()):
                self._handle(self._inbox.get())
            self._step()

    def _read(self) -> None:
        for message in self._channel.receive():
            self._inbox.put(message)
        os._exit(0)

    def _handle(self, message: dict[str, Any]) -> None:
        match message["op"]:
            case "add":
                for job in message["jobs"]:
                    if job["tokens"] == [7]:
                        os._exit(9)
                    if job["tokens"] == [9] and not (mark := Path(os.environ["MOCK_DIED"])).exists():
                        mark.touch()
                        os._exit(9)
                    self._requests[job["id"]] = job | {"n": 0}
                self._channel.send({"op": "accepted", "ids": [job["id"] for job in message["jobs"]]})
            case "cancel":
                if message["id"] in self._requests:
                    end = self._end(message["id"], "cancelled")
                    self._channel.send({"op": "step", "ends": [end], "stats": self._stats()})
            case "call":
                self._channel.send({"op": "answer", "id": message["id"], "result": {}})
            case "stop":
                os._exit(0)

    def _step(self) -> None:
        """Takes its seconds, this function's own time included: a device computes while its host prepares."""
        now = time.perf_counter()
        began = self._ended if now - self._ended < _ASLEEP else now
        self._ended = began + self._step_seconds(len(self._requests))
        self._n_steps += 1
        pieces, ends, dies = [], [], False
        for number, request in list(self._requests.items()):
            request["n"] += 1
            pieces.append([number, PIECES[request["n"] % len(PIECES)], [request["n"] % 90 + 10]])
            dies |= request["tokens"] == [8]
            if request["n"] >= request["params"].get("max_tokens", 16):
                ends.append(self._end(number, "length"))
        message: dict[str, Any] = {"op": "step", "pieces": pieces, "ends": ends}
        if ends:
            message["stats"] = self._stats()
        if (pause := self._ended - time.perf_counter()) > 0:
            time.sleep(pause)
        self._channel.send(message)
        if dies:
            self._channel.drain(1.0)
            os._exit(9)

    def _end(self, number: int, reason: str) -> dict[str, Any]:
        request = self._requests.pop(number)
        return {
            "id": number,
            "reason": reason,
            "stop": None,
            "prompt_tokens": len(request["tokens"]),
            "cached_tokens": 0,
            "new_tokens": request["n"],
            "queued_seconds": 0.0,
            "prompt_seconds": 0.001,
            "new_seconds": 0.001 * request["n"],
            "n_preemptions": 0,
            "n_retries": 0,
            "n_drafts": 0,
            "n_drafted": 0,
            "n_accepted": 0,
            "error": None,
        }

    def _stats(self) -> dict[str, Any]:
        return {"n_running": len(self._requests), "n_waiting": 0, "n_steps": self._n_steps, "cache": {}}


def interpolated(points: str) -> Callable[[int], float]:
    """Seconds of a step by its rows, from `ROWS:MILLISECONDS,…` in ascending order."""
    known = [(int(rows), float(ms) / 1e3) for rows, ms in (point.split(":") for point in points.split(","))]

    def seconds(n_rows: int) -> float:
        (rows, time_at), *rest = known
        for next_rows, next_time in rest:
            if n_rows <= next_rows:
                return time_at + (next_time - time_at) * max(0, n_rows - rows) / (next_rows - rows)
            rows, time_at = next_rows, next_time
        return time_at

    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps-per-second", type=float, default=0.0)
    parser.add_argument("--step-ms", default="")
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("socket", type=int)
    options = parser.parse_args()
    channel = Channel(socket.socket(fileno=options.socket))
    pause = 1 / options.steps_per_second if options.steps_per_second else 0.0
    engine = MockEngine(channel, interpolated(options.step_ms) if options.step_ms else lambda _: pause)
    info = {
        "n_ctx": N_CTX,
        "n_parallel": options.parallel,
        "n_batch": 512,
        "n_vocab": 4096,
        "n_params": 0,
        "size": 0,
        "memory": {},
        "devices": {},
        "load_seconds": 0.0,
        "notices": [],
        "details": [],
        "stats": {"n_running": 0, "n_waiting": 0, "n_steps": 0, "cache": {}},
    }
    channel.send({"op": "ready", "info": info})
    engine.run()


if __name__ == "__main__":
    main()
