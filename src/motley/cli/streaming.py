"""Print an answer as it comes, and let Ctrl-C stop it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from motley.engine import Completion
from motley.llm import Stream


def print_stream(stream: Stream) -> Completion:
    """Write the pieces to standard output until the stream ends, or Ctrl-C ends it."""
    last = ""
    with catching_interrupt() as is_interrupted:
        for piece in stream.until(is_interrupted):
            last = piece
            sys.stdout.write(piece)
            sys.stdout.flush()
    stream.close()
    if not last.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    return stream.completion


@contextmanager
def catching_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C once asks, and is heard between two passes: no step is cut in half. Twice, it insists."""
    is_interrupted = False
    before = signal.getsignal(signal.SIGINT)

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: is_interrupted
    finally:
        signal.signal(signal.SIGINT, before)
