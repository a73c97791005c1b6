"""The `motley` command: reads flags, calls `motley.LLM` and prints.

Only the standard library is imported here: `main` first decides what Ctrl-C does, and then imports the rest.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from motley.early_start import begin
from motley.lean_torch import defer
from motley.milestones import mark

__all__ = ["app", "main"]
_INTERRUPTED = 130  # as in a shell: 128 + SIGINT

if TYPE_CHECKING:
    from motley.cli.commands import app
else:

    def __getattr__(name: str) -> Any:
        if name != "app":
            raise AttributeError(f"module 'motley.cli' has no attribute {name!r}")
        return import_module("motley.cli.commands").app


def main() -> None:
    """Runs the command line and ends the process.

    Imports take a second in which an interrupt would print a trace out of some library: until the command begins
    (`Command.invoke`), Ctrl-C ends the process as it ends a program in C. The process ends without Python's clean-up,
    which takes longer than a user wants to wait and has nothing to do: models are closed, files are written.
    """
    mark("Python")
    if (
        os.environ.get("COLUMNS", "").strip() == "0"
    ):  # a terminal of unknown width; rich would print empty lines
        del os.environ["COLUMNS"]
    is_ignored = (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    )  # after nohup, or in the background of a script
    if not is_ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    begin(sys.argv[1:])
    defer()
    try:
        code = import_module("motley.cli.commands").run()
    except KeyboardInterrupt:
        code = _INTERRUPTED
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end(code)


def end(code: int) -> None:
    """Ends the process at once, after what was printed is written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 1
    os._exit(code)
