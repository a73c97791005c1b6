"""Which tokens go through the model next. Imports no torch: it is tested in microseconds.

There are no phases. Each request has tokens and a count of those computed; a step takes pending tokens of running
requests, oldest first, up to `n_batch`, and then admits waiting ones. When the cache is full the youngest running
request is preempted: it gives up its blocks, keeps its tokens, and is computed again when there is room.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from motley.engine.request import Request
from motley.errors import CacheError
from motley.kvcache.manager import CacheManager
from motley.kvcache.sequences import BlockCopy, BlockShift


@dataclass
class Step:
    """What runs next: for each request, how many of its pending tokens."""

    work: list[tuple[Request, int]] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    n_tokens: int = 0

    def add(self, request: Request, n_tokens: int, copies: Iterable[BlockCopy]) -> None:
        self.work.append((request, n_tokens))
        self.copies.extend(copies)
        self.n_tokens += n_tokens

    def tokens(self) -> list[int]:
        """All that it computes, in the order of work; before it is complete."""
        return [
            token
            for request, n in self.work
            for token in request.tokens[request.n_computed : request.n_computed + n]
        ]

    def drop(self, request: Request) -> None:
        self.work = [(other, n) for other, n in self.work if other is not request]
        self.n_tokens = sum(n for _, n in self.work)


class Scheduler:
    """Continuous batching over a cache that may be full. Engine thread only."""

    def __init__(self, cache: CacheManager, *, n_batch: int, n_parallel: int) -> None:
        self.cache = cache
        self.n_batch = n_batch
        self.n_parallel = n_parallel
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def requests(self) -> list[Request]:
        return [*self.running, *self.waiting]

    def add(self, request: Request) -> None:
        """Queue a request; refuses one that could not finish even alone (CacheError)."""
        self.cache.require_fit(request.n_most, self.n_batch)
        self.waiting.append(request)

    def shift_full(self) -> list[BlockShift]:
        """Make room in requests whose context is full; the result is to be carried out at once.

        Half of what comes after the kept tokens is dropped, the oldest first. Where the cache cannot be shifted the
        request is computed again, from the tokens that it has left.
        """
        shifts: list[BlockShift] = []
        for request in [request for request in self.running if request.is_full]:
            assert request.shift is not None
            assert request.sequence is not None
            n_keep = request.shift.n_keep
            n_drop = (len(request.tokens) - n_keep) // 2
            moved = self.cache.shift(request.sequence, n_keep, n_drop)
            request.drop(n_keep, n_drop)
            if moved is None:
                self._suspend(request)
            else:
                shifts.extend(moved)
        return shifts

    def schedule(self) -> Step:
        """Choose the next step's tokens and reserve their slots."""
        step = Step()
        for request in list(self.running):
            if request in self.running and step.n_tokens < self.n_batch:  # not preempted meanwhile
                self._extend(step, request)
        while self.waiting and len(self.running) < self.n_parallel and step.n_tokens < self.n_batch:
            if not self._admit(step, self.waiting[0]):
                break
            self.waiting.popleft()
        if self.has_work and not step.work:
            raise CacheError(
                "no request can run: sequences outside the queue hold the KV cache",
                hint="close bare sequences",
            )
        return step

    def foresee(self) -> Step | None:
        """The step after the one that has just begun, should all that happens be that each request gets a token.

        Its slots are reserved, which is no loss if something else happens. None where that is sure, or where copies
        would be due.
        """
        if self.waiting or len(self.running) > self.n_batch:
            return None
        if any(request.n_pending or not request.goes_on for request in self.running):
            return None
        step = Step()
        for request in self.running:
            assert request.sequence is not None
            self.cache.advance(request.sequence, request.n_computed)
            if self.cache.reserve(request.sequence, 1, may_copy=False) is None:
                return None
            step.add(request, 1, ())
        return step

    def is_next(self, foreseen: Step) -> bool:
        """Whether nothing has happened but what was foreseen."""
        return (
            not self.waiting
            and self.running == [request for request, _ in foreseen.work]
            and all(request.n_pending == 1 for request in self.running)
        )

    def complete(self, step: Step) -> None:
        """The step has run: its tokens' K/V are in the cache."""
        for request, n_tokens in step.work:
            assert request.sequence is not None
            done = request.tokens[request.n_computed : request.n_computed + n_tokens]
            self.cache.commit(request.sequence, done)
            request.n_computed += n_tokens

    def abandon(self, step: Step) -> None:
        """The step has failed: its copies may not have been made, so nothing that it touched may be found again."""
        for request, _ in reversed(step.work):
            self._suspend(request, is_sound=False)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._release(request)

    def _extend(self, step: Step, request: Request) -> None:
        """Add pending tokens of a running request, preempting younger ones for their blocks if need be."""
        assert request.sequence is not None
        n_tokens = min(request.n_pending, self.n_batch - step.n_tokens)
        self.cache.advance(request.sequence, request.n_computed)
        while (room := self.cache.reserve(request.sequence, n_tokens)) is None:
            youngest = self.running[-1]
            self._preempt(step, youngest)
            if youngest is request:
                return
        step.add(request, n_tokens, room)

    def _admit(self, step: Step, request: Request) -> bool:
        """Start a waiting request if its next chunk has room; never at the cost of a running one."""
        opened = self.cache.open(request.tokens)
        n_tokens = min(len(request.tokens) - opened.n_cached, self.n_batch - step.n_tokens)
        self.cache.advance(opened.seq, opened.n_cached)
        room = self.cache.reserve(opened.seq, n_tokens)
        if room is None:
            self.cache.free(opened.seq)
            return False
        if not request.started:
            request.started = time.perf_counter()
            request.n_cached = opened.n_cached
        request.sequence, request.n_computed = opened.seq, opened.n_cached
        step.add(request, n_tokens, (*opened.copies, *room))
        self.running.append(request)
        return True

    def _preempt(self, step: Step, request: Request) -> None:
        step.drop(request)
        self._suspend(request)

    def _suspend(self, request: Request, *, is_sound: bool = True) -> None:
        """Back to the front of the queue, without its cache."""
        self.running.remove(request)
        self._release(request, is_sound=is_sound)
        self.waiting.appendleft(request)

    def _release(self, request: Request, *, is_sound: bool = True) -> None:
        if request.sequence is not None:
            self.cache.free(request.sequence, is_sound=is_sound)
        request.sequence, request.n_computed = None, 0
