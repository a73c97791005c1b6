"""The internal request type: what every API becomes, and what comes back for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from motley.engine.params import SamplingParams
from motley.server.errors import ApiError

_MAX_UNREAD = 20_000  # pieces that a deaf reader may leave before its request is cancelled


@dataclass(frozen=True)
class Job:
    """One answer to be generated."""

    tokens: tuple[int, ...]
    params: SamplingParams
    continues_prompt: bool = True  # the answer's leading space belongs to the text
    shows_special: bool = False  # control tokens appear in the text
    reports_progress: bool = False
    id_slot: int = -1
    leader: int | None = None  # the number of the job with the same prompt that computes it
    discards_answer: bool = False  # only the prompt is computed; the answer is not passed on


class Piece(NamedTuple):
    """The part of an answer that one step added."""

    choice: int  # the number of the job in its mailbox
    text: str
    tokens: list[int]
    logprobs: list[Any] | None = None  # for each token, if requested


class Progress(NamedTuple):
    """How much of a prompt is computed."""

    choice: int
    n_prompt: int
    n_cached: int
    n_processed: int
    seconds: float


@dataclass(frozen=True)
class End:
    """How an answer ended."""

    choice: int
    reason: str  # "stop", "length", "cancelled", "failed"
    stop: str | None  # the stop string
    n_prompt: int
    n_cached: int
    n_new: int
    queued_seconds: float
    prompt_seconds: float
    new_seconds: float
    n_preemptions: int
    n_retries: int
    id_slot: int
    error: ApiError | None
    n_drafts: int = 0  # steps with a draft
    n_drafted: int = 0  # tokens that drafters guessed
    n_accepted: int = 0


Event = Piece | Progress | End


class Mailbox:
    """The engine's events for the jobs of one HTTP request. One reader; the engine's messages never wait for it.

    The reader is a coroutine (`take`), or a function that `wake` calls (`on_events`).
    """

    __slots__ = ("_events", "_waiter", "n_open", "on_events")

    def __init__(self, n_jobs: int) -> None:
        self.n_open = n_jobs
        self.on_events: Callable[[], None] | None = None
        self._events: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_overfull(self) -> bool:
        return len(self._events) > _MAX_UNREAD

    def put(self, event: Piece | Progress) -> None:
        """Keeps an event. Its reader learns of it by `wake`, which is called once for all events of a message."""
        self._events.append(event)

    def put_end(self, end: End) -> None:
        self._events.append(end)
        self.n_open -= 1

    def wake(self) -> None:
        if self.on_events is not None:
            self.on_events()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take_now(self) -> list[Event]:
        """All events since the last call, perhaps none."""
        events = self._events
        if events:
            self._events = []
        return events

    async def take(self) -> list[Event]:
        """All events since the last call, at least one; an empty list when all jobs have ended."""
        while not self._events:
            if not self.n_open:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.take_now()
