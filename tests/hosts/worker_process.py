"""Worker processes for tests, on a free port of 127.0.0.1. They are killed at the end, whatever happens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

_SECONDS = 120  # to start: a loaded machine imports torch slowly


class WorkerProcess:
    """`motley worker`, with one thread."""

    def __init__(
        self,
        *flags: str,
        port: int = 0,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
        program: Sequence[str] = ("-m", "motley"),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`prefix`: words before the command. `program`: what Python runs. `variables`: of the environment."""
        command = [
            *prefix,
            sys.executable,
            *program,
            "worker",
            "--listen",
            f"{host}:{port}",
            "-t",
            "1",
            *flags,
        ]
        self._process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | dict(variables or {}),
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        self.address = re.findall(r"listening on (\S+)", self.wait_for("listening on"))[0]
        self.port = int(self.address.rpartition(":")[2])

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for(self, text: str, n_times: int = 1) -> str:
        """The `n_times`-th line of its log that contains `text`."""

        def found() -> list[str]:
            return [line for line in self.lines if text in line]

        with self._changed:
            self._changed.wait_for(lambda: len(found()) >= n_times or self._is_over, _SECONDS)
            assert len(found()) >= n_times, f"no {text!r} in {self.lines}"
            return found()[n_times - 1]

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)
        end = time.monotonic() + _SECONDS
        while number == signal.SIGSTOP and self._state != "T":  # its threads stop a moment later
            assert time.monotonic() < end, "it does not stop"

    @property
    def _state(self) -> str:
        """One letter, as the system gives it: T is stopped."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def kill(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait(_SECONDS)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    _is_over = False

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._changed:
                self.lines.append(line.rstrip())
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


@contextmanager
def worker_processes(n: int, flags: Sequence[str] = ()) -> Iterator[list[WorkerProcess]]:
    with ExitStack() as stack:
        found = []
        for _ in range(n):
            found.append(WorkerProcess(*flags))
            stack.callback(found[-1].kill)
        yield found
