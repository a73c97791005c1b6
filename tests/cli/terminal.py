"""`motley` in a pseudo-terminal: what a user types and sees."""

from __future__ import annotations

import contextlib
import errno
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from fcntl import ioctl
from types import TracebackType

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07|\x1b[=>]")
_DEADLINE = 120  # seconds


class Terminal:
    """A process in a terminal of 80 columns. `expect` waits for text, `type` sends keys."""

    def __init__(self, *args: str, columns: int = 80, **environment: str) -> None:
        self.seen = ""  # all output, with its escapes
        self._read_to = 0  # where `expect` goes on
        self._pid, self._fd = pty.fork()
        if self._pid == 0:  # pragma: no cover
            os.environ.update({"TERM": "xterm-256color", "COLUMNS": str(columns), **environment})
            os.execv(sys.executable, [sys.executable, "-m", "motley", *args])
        ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._fd)

    @property
    def text(self) -> str:
        """The output without colours and cursor movements."""
        return _ESCAPES.sub("", self.seen).replace("\r\n", "\n")

    def expect(self, pattern: str) -> str:
        """Waits for a regular expression in new output, and returns what it matched."""
        deadline = time.monotonic() + _DEADLINE
        while (found := re.search(pattern, self.seen[self._read_to :])) is None:
            if not self._read(deadline):
                raise AssertionError(f"{pattern!r} did not come:\n{self.text}")
        self._read_to += found.end()
        return found[0]

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        os.kill(self._pid, signal.SIGINT)

    def wait(self) -> int:
        """Reads until the process has ended, and returns its exit code; -2 if SIGINT ended it."""
        deadline = time.monotonic() + _DEADLINE
        while self._read(deadline):
            pass
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return os.waitstatus_to_exitcode(status)

    def _read(self, deadline: float) -> bool:
        """Reads what there is. Returns False at the end of output."""
        ready, _, _ = select.select([self._fd], [], [], max(0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"the process did not go on:\n{self.text}")
        try:
            piece = os.read(self._fd, 65536)
        except OSError as error:
            if error.errno != errno.EIO:  # Linux: the other side is closed
                raise
            return False
        self.seen += piece.decode(errors="replace")
        return bool(piece)
