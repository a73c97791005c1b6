"""Collects what a step gives to all requests into one message. Runs on the engine's thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from motley.engine.outbox import Outbox
from motley.engine.request import Completion, Request

if TYPE_CHECKING:
    from motley.engine.engine import Engine
    from motley.errors import MotleyError

_STATS_EVERY = 0.25  # seconds between two snapshots of the cache


class Collector:
    """The outboxes of all requests of the process, and what they have got since the last message."""

    def __init__(self, engine: Engine, send: Callable[[dict[str, Any]], None], *, hold: float = 0.0) -> None:
        """`hold`: seconds; tokens of quicker steps share a message. Each message wakes the front and the clients."""
        self._engine = engine
        self._hold = hold
        self._send = send
        self._changed: dict[CollectedOutbox, None] = {}  # an ordered set
        self._watched: dict[CollectedOutbox, None] = {}  # their progress is reported
        self._is_idle = True
        self._n_runs = 0  # of the latest snapshot
        self._loss: MotleyError | None = None
        self._stats_at = 0.0
        self._sent_at = 0.0

    def attach(self, number: int, request: Request, *, reports_progress: bool) -> None:
        """Gives a new request its outbox."""
        request.outbox = CollectedOutbox(self, number, request, reports_progress=reports_progress)

    def note(self, outbox: CollectedOutbox) -> None:
        self._changed[outbox] = None

    def watch(self, outbox: CollectedOutbox) -> None:
        self._watched[outbox] = None

    def flush(self) -> list[int]:
        """Sends one message with all that is new. Returns the requests that ended. Called after each turn."""
        now = time.monotonic()
        is_idle = not self._engine.has_work
        if now - self._sent_at < self._hold and self._engine.can_step and self._can_wait():
            return []
        ended: list[int] = []
        message: dict[str, Any] = {}
        if self._watched:
            message["progress"] = self._progress()
        if self._changed:
            changed, self._changed = list(self._changed), {}
            message["pieces"] = [piece for outbox in changed if (piece := outbox.take_piece())]
            message["ends"] = [outbox.end for outbox in changed if outbox.end is not None]
            ended = [end["id"] for end in message["ends"]]
        n_runs = self._engine.runner.n_runs
        has_changed = is_idle != self._is_idle or self._engine.loss is not self._loss
        has_changed |= is_idle and n_runs != self._n_runs  # embeddings are no requests
        if has_changed or now - self._stats_at > _STATS_EVERY:
            self._is_idle, self._loss, self._stats_at = is_idle, self._engine.loss, now
            self._n_runs = n_runs
            message["stats"] = self.stats()
        if message:
            message["op"] = "step"
            self._sent_at = now
            self._send(message)
        return ended

    def _can_wait(self) -> bool:
        """Whether all news is text of unfinished answers, which can be sent with the next step's."""
        if self._watched or self._engine.loss is not self._loss:
            return False
        return all(outbox.can_wait for outbox in self._changed)

    def stats(self) -> dict[str, Any]:
        """Counts of the engine, as the front shows them without asking again."""
        scheduler = self._engine.scheduler
        return {
            "n_running": len(scheduler.running),
            "n_waiting": len(scheduler.waiting),
            "n_steps": self._engine.runner.n_runs,
            "cache": asdict(self._engine.cache.stats()),
            "loss": None if self._engine.loss is None else str(self._engine.loss),
        }

    def _progress(self) -> list[list[Any]]:
        watched = list(self._watched)  # a copy: requests are attached by another thread
        lines = [line for outbox in watched for line in outbox.take_progress()]
        for outbox in watched:
            if outbox.is_progress_sent:
                del self._watched[outbox]
        return lines


class CollectedOutbox(Outbox[Completion]):
    """One request's outbox, which puts everything into the collector's next message."""

    def __init__(
        self, collector: Collector, number: int, request: Request, *, reports_progress: bool
    ) -> None:
        super().__init__()
        self.end: dict[str, Any] | None = None
        self.is_progress_sent = False  # its progress is complete
        self._collector = collector
        self._number = number
        self._request = request
        self._pieces: list[str] = []
        self._n_sent = 0  # tokens
        self._n_reported = -1  # prompt tokens in the latest progress
        if reports_progress:
            collector.watch(self)

    def put(self, piece: str) -> None:
        self._pieces.append(piece)
        self._collector.note(self)

    @property
    def can_wait(self) -> bool:
        """Whether the news can wait: not the first token, not the end, and no probabilities of tokens."""
        return self.end is None and self._n_sent > 0 and self._request.logprobs is None

    def finish(self, result: Completion) -> None:
        self._result = result
        self.is_progress_sent = True
        timings, request = result.timings, self._request
        self.end = {
            "id": self._number,
            "reason": result.finish_reason,
            "stop": request.text.stop_found,
            "prompt_tokens": timings.prompt_tokens,
            "cached_tokens": timings.cached_tokens,
            "new_tokens": timings.new_tokens,
            "queued_seconds": timings.queued_seconds,
            "prompt_seconds": timings.prompt_seconds,
            "new_seconds": timings.new_seconds,
            "n_preemptions": timings.n_preemptions,
            "n_retries": timings.n_retries,
            "n_drafts": sum(count.drafts for count in timings.drafts.values()),
            "n_drafted": sum(count.drafted for count in timings.drafts.values()),
            "n_accepted": sum(count.accepted for count in timings.drafts.values()),
            "error": None if result.error is None else describe_error(result.error),
        }
        self._collector.note(self)

    def take_piece(self) -> list[Any] | None:
        """[number, text, tokens] since the last call, with log probabilities if requested; None: there is nothing."""
        tokens = self._request.generated[self._n_sent :]
        if not (self._pieces or tokens):
            return None
        self._n_sent += len(tokens)
        text = "".join(self._pieces)
        self._pieces.clear()
        if self._request.logprobs is None:
            return [self._number, text, tokens]
        found = self._request.logprobs[self._n_sent - len(tokens) : self._n_sent]
        return [self._number, text, tokens, [[each.logprob, each.top] for each in found]]

    def take_progress(self) -> list[list[Any]]:
        """[number, prompt tokens, cached ones, processed ones, seconds] for each change since the last call."""
        request = self._request
        if not request.started or self.is_progress_sent:
            return []
        n_prompt, n_cached = len(request.prompt), request.n_cached
        now = time.perf_counter() - request.started
        lines = []
        if self._n_reported < 0:
            self._n_reported = n_cached
            lines.append([self._number, n_prompt, n_cached, n_cached, 0.0])
        n_processed = min(request.n_computed, n_prompt)
        if n_processed > self._n_reported:
            self._n_reported = n_processed
            lines.append([self._number, n_prompt, n_cached, n_processed, now])
        self.is_progress_sent = self._n_reported >= n_prompt
        return lines


def describe_error(error: BaseException) -> dict[str, Any]:
    """An error as plain data: its class, message and hint."""
    message = getattr(error, "message", None) or str(error) or type(error).__name__
    return {"kind": type(error).__name__, "message": message, "hint": getattr(error, "hint", None)}
