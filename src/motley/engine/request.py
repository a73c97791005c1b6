"""A request: its tokens, how far they have been computed, and the text that has come of them. Imports no torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from motley.errors import MotleyError
from motley.text import StopChecker, Tokenizer

STOP = "stop"  # an end-of-generation token, a stop token or a stop string
LENGTH = "length"  # max_tokens, or the context is full
CANCELLED = "cancelled"
FAILED = "failed"


@dataclass(frozen=True)
class Timings:
    """Seconds are wall-clock: prompt from first schedule to first token, new from there to the end."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    prompt_seconds: float
    new_tokens: int
    new_seconds: float

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens computed per second."""
        return (
            (self.prompt_tokens - self.cached_tokens) / self.prompt_seconds
            if self.prompt_seconds > 0
            else 0.0
        )

    @property
    def new_rate(self) -> float:
        """Tokens per second after the first."""
        return (
            (self.new_tokens - 1) / self.new_seconds if self.new_seconds > 0 and self.new_tokens > 1 else 0.0
        )


@dataclass(frozen=True)
class Completion:
    """What came of a request."""

    text: str
    tokens: tuple[int, ...]  # generated ones; an end-of-generation token is not among them
    finish_reason: str
    timings: Timings


@dataclass(frozen=True)
class ContextShift:
    """What to do when the context is full: keep the first `n_keep` tokens and drop half of the others."""

    n_ctx: int  # tokens that the request may have in the cache
    n_keep: int


@dataclass(eq=False)
class Request:
    """Mutable state of one request. The scheduler moves `n_computed`, the engine appends tokens."""

    prompt: tuple[int, ...]
    sampler: Any  # an engine.sampling.Sampler; this module needs no torch
    text: TextStream
    stop_ids: frozenset[int]
    max_tokens: int | None  # generated ones; None: endless, with a context that shifts
    shift: ContextShift | None = None
    tokens: list[int] = field(init=False)  # prompt and generated, less what a shift has dropped
    generated: list[int] = field(init=False, default_factory=list)
    sequence: int | None = None  # in the cache, while scheduled
    n_computed: int = 0  # tokens whose K/V are in the cache
    n_cached: int = 0  # of the prompt, found there at the first start
    finish_reason: str | None = None
    error: MotleyError | None = None
    started: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def n_generated(self) -> int:
        return len(self.generated)

    @property
    def n_most(self) -> int:
        """The most tokens that it will have in the cache at a time; the last one it makes is never stored."""
        ends = [] if self.max_tokens is None else [len(self.prompt) + max(1, self.max_tokens) - 1]
        return min(ends + ([self.shift.n_ctx] if self.shift is not None else []))

    @property
    def is_full(self) -> bool:
        """Whether the next token has no place in the context before something is dropped."""
        return self.shift is not None and len(self.tokens) > self.shift.n_ctx

    @property
    def goes_on(self) -> bool:
        """Whether it runs on after its next token, whichever that is, unless it is one that stops."""
        is_last = self.max_tokens is not None and self.n_generated + 1 >= self.max_tokens
        return not is_last and (self.shift is None or len(self.tokens) < self.shift.n_ctx)

    @property
    def n_pending(self) -> int:
        """Tokens still to be computed."""
        return len(self.tokens) - self.n_computed

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def accept(self, token: int) -> None:
        """Take a sampled token; may finish the request."""
        now = time.perf_counter()
        self.first_token = self.first_token or now
        if token in self.stop_ids:
            self.finish(STOP)
            return
        self.tokens.append(token)
        self.generated.append(token)
        self.text.push(token)
        if self.text.is_stopped:
            self.finish(STOP)
        elif self.max_tokens is not None and self.n_generated >= self.max_tokens:
            self.finish(LENGTH)

    def drop(self, n_keep: int, n_drop: int) -> None:
        """Forget tokens, as its sequence in the cache does."""
        del self.tokens[n_keep : n_keep + n_drop]
        self.n_computed -= n_drop

    def finish(self, reason: str) -> None:
        self.finish_reason = reason
        self.finished = time.perf_counter()
        self.text.finish()

    def fail(self, error: MotleyError) -> None:
        """End with an error, for whoever asks for the answer."""
        self.error = error
        self.finish(FAILED)

    def completion(self) -> Completion:
        """The answer; raises the error of a request that failed."""
        assert self.finish_reason is not None, "the request is still running"
        if self.error is not None:
            raise self.error
        first = self.first_token or self.finished
        timings = Timings(
            prompt_tokens=len(self.prompt),
            cached_tokens=self.n_cached,
            prompt_seconds=first - self.started if self.started else 0.0,
            new_tokens=self.n_generated,
            new_seconds=self.finished - first,
        )
        return Completion(self.text.all, tuple(self.generated), self.finish_reason, timings)


class TextStream:
    """Tokens in, whole characters out, up to the first stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: tuple[str, ...]) -> None:
        self._detokenizer = tokenizer.stream(after=prompt)
        self._stops = StopChecker(stops)
        self._pieces: list[str] = []
        self._unread: deque[str] = deque()
        self.is_stopped = False

    @property
    def all(self) -> str:
        return "".join(self._pieces)

    def push(self, token: int) -> None:
        self._emit(self._detokenizer.push(token))

    def finish(self) -> None:
        """Emit what was held back: an unfinished character, the beginning of a stop string that did not come."""
        if not self.is_stopped:
            self._emit(self._detokenizer.flush())
        if not self.is_stopped:
            self._append(self._stops.flush())

    def take(self) -> str:
        """What has been emitted since the last call."""
        text = "".join(self._unread)
        self._unread.clear()
        return text

    def _emit(self, piece: str) -> None:
        text, self.is_stopped = self._stops.push(piece)
        self._append(text)

    def _append(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._unread.append(text)
