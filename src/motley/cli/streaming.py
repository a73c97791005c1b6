"""Prints an answer as it arrives; Ctrl-C stops it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from motley.cli.painting import Painter, make_painter
from motley.engine import Completion, Stream


def print_stream(stream: Stream, painter: Painter | None = None) -> Completion:
    """Writes the pieces to standard output until the stream ends or Ctrl-C stops it, and returns the completion."""
    painter = painter or make_painter()
    try:
        with catching_interrupt() as is_interrupted:
            for piece in stream.until(is_interrupted):
                painter.write(piece)
    finally:
        painter.finish()
    stream.close()
    return stream.completion


@contextmanager
def catching_interrupt() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C was pressed, to be called between two pieces.

    The first Ctrl-C only sets this flag, so that no step is interrupted. The second raises KeyboardInterrupt.
    """
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
