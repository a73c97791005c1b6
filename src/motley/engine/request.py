"""A request: its tokens, how many of them are computed, and its text. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from motley.engine.effort import FULL, Effort, prefix_salt
from motley.engine.outbox import Outbox
from motley.engine.trees import ROOT, Parents, child_of
from motley.errors import MotleyError
from motley.grammar import Matcher
from motley.text import StopChecker, Tokenizer

STOP = "stop"  # an end-of-generation token, a stop token or a stop string
LENGTH = "length"  # max_tokens, or the context is full
CANCELLED = "cancelled"
FAILED = "failed"


class DraftCount(NamedTuple):
    """The tokens that a drafter has drafted for a request, and how many of them were right."""

    drafted: int = 0
    accepted: int = 0
    drafts: int = 0  # steps with such a draft


_NO_DRAFTS = DraftCount()


@dataclass(frozen=True)
class Timings:
    """Counts and wall-clock seconds: queued until the first step, prompt until the first token, new until the end."""

    prompt_tokens: int
    cached_tokens: int  # tokens of the prompt that were a prefix hit
    prompt_seconds: float
    new_tokens: int
    new_seconds: float
    queued_seconds: float = 0.0
    n_preemptions: int = 0  # how often it was preempted
    n_retries: int = 0  # how often one of its steps failed and was computed again
    n_steps: int = 0  # steps that gave it tokens: with speculation, fewer than tokens
    drafts: Mapping[str, DraftCount] = field(default_factory=dict)  # by drafter, as far as there were drafts

    @property
    def tokens_per_step(self) -> float:
        """New tokens for each step that gave any."""
        return self.new_tokens / self.n_steps if self.n_steps else 0.0

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


class TokenLogprobs(NamedTuple):
    """A generated token's natural log-probability, and those of the likeliest tokens in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), likeliest first


@dataclass(frozen=True)
class Completion:
    """The answer to a request, complete or partial."""

    text: str
    tokens: tuple[int, ...]  # generated ones; an end-of-generation token is not among them
    finish_reason: str  # "stop", "length", "cancelled" or "failed"
    timings: Timings
    error: MotleyError | None = None  # why it failed
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each of `tokens`, if requested

    def require(self) -> Completion:
        """This completion; raises its error if the request failed."""
        if self.error is not None:
            raise self.error
        return self


@dataclass(frozen=True)
class ContextShift:
    """Context shift: a full context keeps its first `n_keep` tokens and drops half of the others."""

    n_ctx: int  # tokens that the request may have in the cache
    n_keep: int


@dataclass(frozen=True)
class Speculation:
    """The drafters that a request uses, and the most tokens of its drafts."""

    drafters: tuple[str, ...] = ()
    draft_max: int = 0
    draft_min: int = 0  # shorter drafts are not used


@dataclass(eq=False, slots=True)  # slots: each step reads many of them, of every request
class Request:
    """Mutable state of one request, for the engine's thread. Readers in other threads have its `outbox`."""

    prompt: tuple[int, ...]
    sampler: Any  # an engine.sampling.Sampler; this module needs no torch
    text: TextStream
    stop_ids: frozenset[int]
    max_tokens: int | None  # generated ones; None: no limit, with context shift
    shift: ContextShift | None = None
    effort: Effort = FULL
    matcher: Matcher | None = None  # what the answer must match
    min_tokens: int = 0  # before the answer may end
    max_seconds: float | None = None  # from the first token on
    cache_prompt: bool = True  # whether it may begin with a prefix hit
    cache_salt: str | None = None  # part of its prefix keys
    leader: Request | None = None  # has the same prompt; this request starts after its first token
    logprobs: list[TokenLogprobs] | None = (
        None  # of `generated`, if requested; readers may read it at any time
    )
    speculation: Speculation = Speculation()
    checkpoints: tuple[int, ...] = ()  # lengths of the prompt at which later prompts may part from it
    outbox: Outbox[Completion] = field(default_factory=Outbox)
    tokens: list[int] = field(init=False)  # prompt and generated, without tokens that a shift dropped
    generated: list[int] = field(init=False, default_factory=list)
    sequence: int | None = None  # in the cache, while scheduled
    n_computed: int = 0  # tokens whose K/V are in the cache
    n_cached: int = 0  # of the prompt: prefix hit at the first start
    prefix_keys: list[bytes] = field(default_factory=list)  # hashes of `tokens`' blocks, as far as computed
    finish_reason: str | None = None
    n_preemptions: int = 0
    n_retries: int = 0
    n_steps: int = 0  # steps that gave it tokens
    draft: tuple[
        int, ...
    ] = ()  # of the step that was computed last, while the chosen tokens are those of the draft
    n_matched: int = 0  # how many of them were right
    draft_parents: Parents = ()  # if the draft is a tree
    draft_place: int = ROOT  # index of the latest token of the draft that was right
    drafts: dict[str, DraftCount] = field(default_factory=dict)  # by drafter
    _drafter: str = ""  # of `draft`
    _n_drafted: int = 0  # tokens that the draft had; 0: it is counted in `drafts`
    n_unused_drafts: int = 0  # drafts that did not pay, since the latest one that was used
    drafts_from: int = 0  # generated tokens: before, no drafter is asked
    memory: dict[str, Any] = field(default_factory=dict)  # what a drafter keeps of this request, by drafter
    queued: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    first_token: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def n_generated(self) -> int:
        return len(self.generated)

    @property
    def max_cached_tokens(self) -> int:
        """The most tokens that it will have in the cache at a time. Its last generated token is never stored."""
        ends = [] if self.max_tokens is None else [len(self.prompt) + max(1, self.max_tokens) - 1]
        return min(ends + ([self.shift.n_ctx] if self.shift is not None else []))

    @property
    def is_full(self) -> bool:
        """Whether the context is full: tokens must be dropped before the next one is computed."""
        return self.shift is not None and len(self.tokens) > self.shift.n_ctx

    @property
    def continues(self) -> bool:
        """Whether the request continues after its next token, unless that token stops it."""
        is_last = self.max_tokens is not None and self.n_generated + 1 >= self.max_tokens
        return not is_last and (self.shift is None or len(self.tokens) < self.shift.n_ctx)

    @property
    def max_draft(self) -> int:
        """The maximum length of a draft now, so that no token of it is beyond the answer or the context.

        A step gives one token more than its draft has, and the last token of an answer is never computed.
        """
        limit = self.speculation.draft_max
        if self.max_tokens is not None:
            limit = min(limit, self.max_tokens - self.n_generated - 1)
        if self.shift is not None:
            limit = min(limit, self.shift.n_ctx - len(self.tokens))
        return max(0, limit)

    @property
    def salt(self) -> bytes:
        """Part of its prefix keys."""
        return prefix_salt(self.effort, self.cache_salt)

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that it may not get yet: those that would end it too early."""
        return self.stop_ids if self.n_generated < self.min_tokens else frozenset()

    @property
    def waits_for_leader(self) -> bool:
        leader = self.leader
        return leader is not None and not leader.is_finished and not leader.first_token

    @property
    def n_pending(self) -> int:
        """The number of tokens still to be computed."""
        return len(self.tokens) - self.n_computed

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def accept(self, token: int, logprobs: TokenLogprobs | None = None) -> None:
        """Appends a sampled token; may finish the request."""
        if not self.first_token:
            self.first_token = time.perf_counter()
        if self.draft:
            self._compare(token)
        if token in self.stop_ids:
            self.finish(STOP)
            return
        if self.matcher is not None:
            self.matcher.accept(token)
        self.tokens.append(token)
        self.generated.append(token)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
        if piece := self.text.push(token):
            self.outbox.put(piece)
        if self.text.is_stopped or (self.matcher is not None and self.matcher.is_complete):
            self.finish(STOP)
        elif (self.max_tokens is not None and len(self.generated) >= self.max_tokens) or (
            self.max_seconds is not None and time.perf_counter() - self.first_token >= self.max_seconds
        ):
            self.finish(LENGTH)

    def expect(self, drafter: str, draft: tuple[int, ...], parents: Parents = ()) -> None:
        """Sets the draft whose rows were computed; `accept` compares it with the tokens that are chosen."""
        self.draft, self.n_matched, self._drafter, self._n_drafted = draft, 0, drafter, len(draft)
        self.draft_parents, self.draft_place = parents, ROOT

    def end_draft(self) -> None:
        """Counts the draft and forgets it: no more tokens are compared with it."""
        self._count_draft()
        self.draft = ()

    def _count_draft(self) -> None:
        if self._n_drafted:
            drafted, accepted, drafts = self.drafts.get(self._drafter, _NO_DRAFTS)
            self.drafts[self._drafter] = DraftCount(
                drafted + self._n_drafted, accepted + self.n_matched, drafts + 1
            )
            self._n_drafted = 0

    def _compare(self, token: int) -> None:
        place = child_of(self.draft, self.draft_parents, self.draft_place, token)
        if place is not None:
            self.n_matched += 1
            self.draft_place = place
        else:
            self.draft = ()  # the later rows were computed after a wrong token, or there are none

    def drop(self, n_keep: int, n_drop: int) -> None:
        """Drops `n_drop` tokens after the first `n_keep`, as its sequence in the cache does."""
        del self.tokens[n_keep : n_keep + n_drop]
        self.n_computed -= n_drop
        self.prefix_keys.clear()

    def finish(self, reason: str) -> None:
        """Ends the request and passes the completion to the reader."""
        if piece := self.text.finish():
            self.outbox.put(piece)
        self._end(reason, None)

    def fail(self, error: MotleyError) -> None:
        """Ends the request with an error. Calls nothing that may have caused the error."""
        self._end(FAILED, error)

    def _end(self, reason: str, error: MotleyError | None) -> None:
        assert self.finish_reason is None, "a request ends once"
        self.finish_reason = reason
        self._count_draft()
        now = time.perf_counter()
        started = self.started or now
        first = self.first_token or now
        timings = Timings(
            prompt_tokens=len(self.prompt),
            cached_tokens=self.n_cached,
            prompt_seconds=first - started,
            new_tokens=self.n_generated,
            new_seconds=now - first,
            queued_seconds=started - self.queued,
            n_preemptions=self.n_preemptions,
            n_retries=self.n_retries,
            n_steps=self.n_steps,
            drafts=dict(self.drafts),
        )
        logprobs = None if self.logprobs is None else tuple(self.logprobs)
        self.outbox.finish(Completion(self.text.all, tuple(self.generated), reason, timings, error, logprobs))


class TextStream:
    """Tokens in, whole characters out, up to the first stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: tuple[str, ...],
        *,
        shows_special: bool = False,
    ) -> None:
        self._detokenizer = tokenizer.stream(after=prompt, skip_special=not shows_special)
        self._stops = StopChecker(stops)
        self._has_stops = bool(stops)
        self._pieces: list[str] = []
        self.is_stopped = False

    @property
    def all(self) -> str:
        return "".join(self._pieces)

    @property
    def stop_found(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.found

    def push(self, token: int) -> str:
        """The text that has become final with this token."""
        piece = self._detokenizer.push(token)
        if self._has_stops:
            return self._checked(piece)
        self._pieces.append(piece)
        return piece

    def finish(self) -> str:
        """The text that was held back: an incomplete character, or an incomplete stop string."""
        text = "" if self.is_stopped else self._checked(self._detokenizer.flush())
        return text if self.is_stopped else text + self._kept(self._stops.flush())

    def _checked(self, piece: str) -> str:
        text, self.is_stopped = self._stops.push(piece)
        return self._kept(text)

    def _kept(self, text: str) -> str:
        self._pieces.append(text)
        return text
