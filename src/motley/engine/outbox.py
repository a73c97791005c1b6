"""`Outbox`: one request's text and result, from the engine's thread to a reader in any thread or event loop.

No lock that a reader can hold is taken here: Ctrl-C may interrupt a reader at any point, also right after it has taken
a lock, and the engine would then never continue. `queue.SimpleQueue` is safe for that.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

R = TypeVar("R")

_LOOK_AGAIN = 1.0  # seconds: a reader whose wake-up went to another reader notices the end no later than this


class Outbox(Generic[R]):
    """Pieces of text, then a result. The engine never waits for the reader: what is not read yet is kept.

    A piece goes to one reader. Readers that only need the result are not woken by text.
    """

    def __init__(self) -> None:
        self._texts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()
        # Of waiting coroutines: those that take text, and those that only need the result.
        self._wakers: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._end_wakers: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._result: R | None = None

    # The engine's side

    def put(self, piece: str) -> None:
        self._texts.put(piece)
        if not self._wakers.empty():
            _wake(self._wakers)

    def finish(self, result: R) -> None:
        """The end; nothing is put after it."""
        self._result = result
        self._texts.put("")
        self._end.put(None)
        _wake(self._wakers)
        _wake(self._end_wakers)

    # The reader's side

    @property
    def is_finished(self) -> bool:
        return self._result is not None

    def take(self, timeout: float | None = None) -> str | None:
        """All text since the last call, as soon as there is some. None at the end, "" after `timeout` seconds."""
        while not (text := self._taken()) and not self.is_finished:
            with suppress(queue.Empty):
                text = self._texts.get(timeout=_LOOK_AGAIN if timeout is None else timeout)
            if text or timeout is not None:
                return text + self._taken() or ("" if not self.is_finished else None)
        return text or self._taken() or None

    def result(self) -> R:
        """Waits for the end."""
        while self._result is None:
            with suppress(queue.Empty):
                self._end.get(timeout=_LOOK_AGAIN)
        self._end.put(None)  # for other readers
        return self._result

    async def atake(self) -> str | None:
        """`take`, for a coroutine."""
        while not (text := self._taken()) and not self.is_finished:
            woken = _future(self._wakers)
            if self._texts.empty() and not self.is_finished:
                await woken
        return text or self._taken() or None

    async def aresult(self) -> R:
        """`result`, for a coroutine."""
        while self._result is None:
            woken = _future(self._end_wakers)
            if not self.is_finished:
                await woken
        return self._result

    def _taken(self) -> str:
        pieces = []
        with suppress(queue.Empty):
            while True:
                pieces.append(self._texts.get_nowait())
        return "".join(pieces)


def _wake(wakers: queue.SimpleQueue[Callable[[], object]]) -> None:
    while not wakers.empty():  # which only the engine's thread empties
        wake = wakers.get_nowait()
        with suppress(RuntimeError):  # that reader's event loop is closed
            wake()


def _future(wakers: queue.SimpleQueue[Callable[[], object]]) -> asyncio.Future[None]:
    """Done when `_wake` is called from here on."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        if not future.done():  # a cancelled reader's is
            future.set_result(None)

    wakers.put(lambda: loop.call_soon_threadsafe(resolve))
    return future
