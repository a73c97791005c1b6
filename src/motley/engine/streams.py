"""Streams of an answer's text, for threads and for coroutines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType

from motley.engine.request import Completion, Request, TokenLogprobs
from motley.engine.service import EngineService
from motley.errors import RequestError

_ASK_EVERY = 0.05  # seconds


class _Reader:
    """One request's reader. A reader that is closed or garbage-collected cancels the request."""

    def __init__(self, service: EngineService, request: Request) -> None:
        self._service = service
        self._outbox = request.outbox
        self._request = request
        self._is_closed = False

    def close(self) -> None:
        """Cancels the request, if it still runs. Does not wait for it."""
        self._is_closed = True
        self._service.cancel(self._request)

    def __del__(self) -> None:
        if hasattr(self, "_is_closed"):  # an interrupt may have come before it was made
            self.close()  # no lock, no wait: the garbage collector may run at any time

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the tokens so far; empty if not requested. Text may come later than its tokens."""
        return tuple(self._request.logprobs or ())

    @property
    def completion(self) -> Completion:
        """The whole answer, once the stream has ended or been closed. Raises the error of a request that failed."""
        if not (self._is_closed or self._outbox.is_finished):
            raise RequestError(
                "the answer is not complete yet", hint="read the stream to its end, or close it"
            )
        if not self._outbox.is_finished:
            self._service.require_reader()
        return self._outbox.result().require()


class Stream(_Reader, Iterator[str]):
    """Yields pieces of an answer as they arrive. Close it to cancel the request. `completion` is set at the end."""

    def __next__(self) -> str:
        for piece in self.until(lambda: False, ask_every=None):
            return piece
        raise StopIteration

    def until(self, is_enough: Callable[[], bool], *, ask_every: float | None = _ASK_EVERY) -> Iterator[str]:
        """The pieces until `is_enough()` is true. It is called before each piece and every `ask_every` seconds."""
        while not (self._is_closed or is_enough()):
            self._service.require_reader()
            piece = self._outbox.take(ask_every)
            if piece is None:
                _ = self.completion  # raises the error of a request that failed
                return
            if piece:
                yield piece

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def finish(self) -> Completion:
        """The completion; waits for it. An interrupt while waiting cancels the request."""
        return self.result().require()

    def result(self) -> Completion:
        """`finish`, but a request that failed is returned, too: see `Completion.error`."""
        self._service.require_reader()
        try:
            return self._outbox.result()
        except BaseException:
            self.close()
            raise


class AsyncStream(_Reader, AsyncIterator[str]):
    """`Stream` for coroutines: `async for piece in stream`."""

    async def __anext__(self) -> str:
        piece = None if self._is_closed else await self._outbox.atake()
        if piece is None:
            if self._outbox.is_finished:
                _ = self.completion
            raise StopAsyncIteration
        return piece

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def finish(self) -> Completion:
        """The completion; waits for it. If the task is cancelled while waiting, the request is cancelled too."""
        return (await self.result()).require()

    async def result(self) -> Completion:
        """`finish`, but a request that failed is returned, too: see `Completion.error`."""
        try:
            return await self._outbox.aresult()
        except BaseException:
            self.close()
            raise
