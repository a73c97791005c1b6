"""Compiles the kernels that loading did not wait for, while requests run.

Batches are recorded on the engine's thread, between two steps and one at a time: each takes a fraction of a second.
While requests run, there is a pause after each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread

from motley.errors import MotleyError
from motley.runtime.runner import Runner
from motley.runtime.warming import KernelWarmer

Call = Callable[[Callable[[], None]], None]  # runs work on the engine's thread and waits for it

_FIRST_PAUSE = 1.0  # seconds that are left to a first request
_PAUSE = 0.5  # seconds between batches while requests run
_log = logging.getLogger("motley")


class BackgroundWarming:
    """A thread that ends when its work is done, or when the model is closed."""

    def __init__(
        self,
        warmer: KernelWarmer,
        runner: Runner,
        *,
        call: Call,
        is_busy: Callable[[], bool],
        set_limit: Callable[[int | None], None],
    ) -> None:
        """`set_limit` is called on the engine's thread, with the rows that steps may have from then on."""
        self._warmer, self._runner = warmer, runner
        self._call, self._is_busy, self._set_limit = call, is_busy, set_limit
        self._is_compiled, self._has_hurry = Event(), Event()
        if not warmer.is_compiling:
            self._is_compiled.set()

    def start(self) -> None:
        if not self._is_compiled.is_set():
            Thread(target=self.run, name="motley-warming", daemon=True).start()

    def wait(self) -> None:
        """Wait until all kernels are compiled; nothing pauses meanwhile."""
        self._has_hurry.set()
        if not self._is_compiled.is_set():
            with suppress(MotleyError):  # the model is closed
                self._call(self._warmer.hurry)
        self._is_compiled.wait()
        self._has_hurry.clear()

    def run(self) -> None:
        """The thread's work."""
        try:
            if self._warmer.waiting:
                self._pause(_FIRST_PAUSE)
            self._compile()
        except MotleyError:  # the model is closed
            pass
        finally:
            self._is_compiled.set()

    def _compile(self) -> None:
        warmer = self._warmer
        try:
            while warmer.is_compiling:
                if warmer.waiting:
                    self._call(lambda: warmer.record_next(self._runner))
                    if self._is_busy():
                        self._pause(_PAUSE)
                if warmer.advance(waits=not warmer.waiting):
                    self._call(lambda: self._set_limit(warmer.max_rows))
        except Exception as error:
            self._call(lambda: self._set_limit(None))  # raises again if the model is closed
            warmer.give_up(str(error))
            _log.warning("kernels are not compiled ahead", exc_info=True)

    def _pause(self, seconds: float) -> None:
        self._has_hurry.wait(seconds)
