"""The steady state: the same requests get their next tokens, in step after step.

Nothing of such a step has to be made again. Which requests run, their block tables, samplers and all inputs except
tokens and positions stay the same, and one native call computes and chooses the next tokens. `Steady` is a step that
can be repeated in this way, also with drafts (`with_drafts`). `Engine._plan` takes it if it is the next step; if
anything has changed, a step is scheduled.

Where steps are short, a call without drafts computes several of them, its *rounds*: Python's part of a step takes as
long for a small model as for a large one. A round in which a request ends is the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, pairwise

from motley.engine.choosing import TokenOrError, checked
from motley.engine.drafting import Draft
from motley.engine.request import Request
from motley.engine.scheduler import Scheduler, Step
from motley.engine.verifying import Chosen
from motley.kvcache.leases import Lease
from motley.kvcache.manager import CacheManager
from motley.runtime import SteadyRun

_MAX_ROUNDS = 8
# Tokens after which a call ends at once: each takes time, and rounds after other stop tokens are dropped as well.
_MAX_STOPS = 64


class Steady:
    """A step with the next token of each running request, to be repeated. Engine thread only."""

    def __init__(self, step: Step, run: SteadyRun) -> None:
        self.step = step
        self.requests = [request for request, _ in step.work]
        self._run = run
        self._lease: Lease | None = None
        self._ends = [0] * len(self.requests)  # positions from which on the lease has to be renewed
        stops: frozenset[int] = frozenset().union(*(request.stop_ids for request in self.requests))
        self._stops = list(islice(stops, _MAX_STOPS))
        self._rounds: list[list[int]] = []  # tokens of the latest call's rounds
        self.seconds = 0.0  # of a round of the latest call
        # The inputs of the next run, by request.
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._indexes: list[int] = []
        self._rows: list[int] = []  # tokens of the next step with drafts, these included
        self._counts: list[int] = []  # of them, by request

    @property
    def is_current(self) -> bool:
        """Whether it can still run; if not, its step has to be made again."""
        return self._run.is_current

    def is_next(self, scheduler: Scheduler) -> bool:
        """Whether this is the next step, if there is room for it."""
        if not scheduler.is_decoding(self.requests) or not self.is_current:
            return False
        tokens: list[int] = []
        positions: list[int] = []
        indexes: list[int] = []
        for request in self.requests:
            position, known = request.n_computed, request.tokens
            if len(known) != position + 1:
                return False
            tokens.append(known[position])
            positions.append(position)
            indexes.append(len(request.generated))
        self._tokens, self._positions, self._indexes = tokens, positions, indexes
        return True

    def reserve(self, cache: CacheManager) -> bool:
        """Reserves its slots; False: the scheduler has to. To be called when the step has begun."""
        lease = self._lease
        if lease is not None and lease.is_valid:
            for position, end in zip(self._positions, self._ends, strict=True):
                if position >= end:
                    break
            else:
                return True
        return self._renew(cache)

    def with_drafts(self, drafts: Mapping[Request, Draft], cache: CacheManager) -> Step | None:
        """The step with these drafts, its slots reserved. None: it has to be scheduled. To be called when the step has
        begun.
        """
        rows: list[int] = []
        counts: list[int] = []
        drafted: dict[Request, tuple[int, ...]] = {}
        for request, token in zip(self.requests, self._tokens, strict=True):
            rows.append(token)
            draft = drafts.get(request)
            if draft is None:
                counts.append(1)
                continue
            if draft.parents:
                return None
            rows += draft.tokens
            counts.append(1 + len(draft.tokens))
            drafted[request] = draft.tokens
        if not self._run.has_rows(len(rows)):
            return None
        lease = self._lease
        is_reserved = lease is not None and lease.is_valid and lease.reserve(counts)
        if not is_reserved and not self._renew(cache, counts):
            return None
        self._rows, self._counts = rows, counts
        return Step(list(zip(self.requests, counts, strict=True)), n_tokens=len(rows), drafts=drafted)

    @property
    def n_computed(self) -> int:
        """The rounds of the latest call."""
        return len(self._rounds)

    def n_rounds(self, seconds: float, n_max: int) -> int:
        """How many rounds a call may have that takes no longer than `seconds`, if a round takes as long as before."""
        if not self.seconds or self.seconds * 2 > seconds or n_max < 2:
            return 1
        n_max = min(n_max, _MAX_ROUNDS, int(seconds / self.seconds))
        for request, position, end in zip(self.requests, self._positions, self._ends, strict=True):
            n_max = min(n_max, end - position)
            if request.max_tokens is not None:
                n_max = min(n_max, request.max_tokens - len(request.generated))
        return n_max

    def run(self, n_rounds: int = 1) -> Chosen:
        """Computes the rounds and records the first one in the cache. Returns its token of each request."""
        assert self._lease is not None
        assert self._lease.is_valid, "the cache has changed since `reserve`"
        self._rounds = self._run.run(self._tokens, self._positions, self._indexes, n_rounds, self._stops)
        self._record(self._tokens)
        return Chosen(checked(self._rounds[0]), {})

    def run_rows(self) -> list[TokenOrError]:
        """Computes the step `with_drafts`. Returns the tokens of all its rows, as if all drafts were right; each
        request's first token is in the cache from now on.
        """
        assert self._lease is not None
        assert self._lease.is_valid, "the cache has changed since `with_drafts`"
        chosen = self._run.run_rows(self._rows, self._counts, self._positions, self._indexes)
        self._record(self._tokens)
        return checked(chosen)

    def further(self) -> Iterator[list[TokenOrError]]:
        """The tokens of the further rounds. Each round is recorded in the cache when its tokens are asked for: its
        inputs must have been accepted, and no request may have ended.
        """
        for inputs, tokens in pairwise(self._rounds):
            self._record(inputs)
            yield checked(tokens)

    def _record(self, tokens: list[int]) -> None:
        """The K/V of these tokens, one of each request, are in the cache."""
        assert self._lease is not None
        self._lease.append(tokens)
        for request in self.requests:
            request.n_computed += 1
            request.n_steps += 1

    def _renew(self, cache: CacheManager, counts: list[int] | None = None) -> bool:
        """Takes a new lease: a block is full, or another sequence has changed the cache. `counts`: see `lease`."""
        if any(request.is_full for request in self.requests):
            return False
        sequences = [request.sequence for request in self.requests if request.sequence is not None]
        assert len(sequences) == len(self.requests)
        self._lease = None
        lease = cache.lease(sequences, counts)
        if lease is None:
            return False
        self._run.place(lease)
        self._lease = lease
        self._ends = [
            end if request.shift is None else min(end, request.shift.n_ctx)
            for request, end in zip(self.requests, lease.ends, strict=True)
        ]
        return True
