"""A server in a process of its own, for tests."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

MOCK = Path(__file__).parent / "mock_server.py"
WAIT = 120.0  # seconds: only a hang takes so long


class RunningServer:
    """`motley serve MODEL --port 0 FLAGS`; `url` is known at once, `wait_until_ready` waits for the model."""

    def __init__(self, *flags: str, is_mock: bool = False, env: dict[str, str] | None = None) -> None:
        """`is_mock`: the front with a mock engine; see mock_server.py."""
        real = ["-m", "motley", "serve", "--host", "127.0.0.1", "--port", "0"]
        self.process = subprocess.Popen(
            [sys.executable, *([str(MOCK)] if is_mock else real), *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )
        self.log: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.url = self._find_url()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def _find_url(self) -> str:
        while (line := self._lines.get(timeout=WAIT)) is not None:
            if match := re.search(r"listening on (http://\S+)", line):
                return match[1]
        raise AssertionError("the server has ended: " + "".join(self.log))

    def wait_until_ready(self) -> RunningServer:
        ends = time.monotonic() + WAIT
        while time.monotonic() < ends:
            if self.process.poll() is not None:
                raise AssertionError("the server has ended: " + "".join(self.log))
            if requests.get(f"{self.url}/health", timeout=WAIT).status_code == 200:
                return self
            time.sleep(0.02)
        raise AssertionError("the model is not loaded: " + "".join(self.log))

    def get(self, path: str, **options: Any) -> requests.Response:
        return requests.get(self.url + path, timeout=WAIT, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=WAIT, **options)

    def ok(self, path: str, body: Any, **options: Any) -> Any:
        """The JSON of a POST that succeeds."""
        reply = self.post(path, body, **options)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The data of all events of a stream."""
        return [data for _, data in self.events(path, body)]

    def events(self, path: str, body: dict[str, Any]) -> Iterator[tuple[str | None, dict[str, Any]]]:
        """(name, data) of each event, as they come."""
        with self.post(path, {**body, "stream": True}, stream=True) as reply:
            assert reply.status_code == 200, reply.text
            name = None
            for line in reply.iter_lines():
                if line.startswith(b"event: "):
                    name = line[7:].decode()
                elif line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield name, json.loads(line[6:])
                    name = None

    def stop(self) -> int:
        """Ends it with SIGTERM; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        try:
            return self.process.wait(WAIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()  # the engine process ends with it
        self.process.wait(WAIT)


def engine_pid(server: RunningServer) -> int:
    """The process that the server has started."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    assert len(children) == 1, children
    return int(children[0])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
