"""The steady state: the same requests get one token each, in step after step.

Nothing of such a step has to be made again. Which requests run, their block tables, samplers and all inputs except
tokens and positions stay the same, and one native call computes and chooses the next tokens. `Steady` is a step that
can be repeated in this way. `Engine._plan` takes it if it is the next step and no request has a draft; if anything has
changed, a step is scheduled.
"""

from __future__ import annotations

from motley.engine.choosing import checked
from motley.engine.scheduler import Scheduler, Step
from motley.engine.verifying import Chosen
from motley.kvcache.leases import Lease
from motley.kvcache.manager import CacheManager
from motley.runtime import SteadyRun


class Steady:
    """A step with one token of each running request, to be repeated. Engine thread only."""

    def __init__(self, step: Step, run: SteadyRun) -> None:
        self.step = step
        self.requests = [request for request, _ in step.work]
        self._run = run
        self._lease: Lease | None = None
        self._ends = [0] * len(self.requests)  # positions from which on the lease has to be renewed
        # The inputs of the next run, by request.
        self._tokens: list[int] = []
        self._positions: list[int] = []
        self._indexes: list[int] = []

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

    def run(self) -> Chosen:
        """Computes the step and records it in the cache. Returns the next token of each request."""
        assert self._lease is not None
        assert self._lease.is_valid, "the cache has changed since `reserve`"
        found = self._run.run(self._tokens, self._positions, self._indexes)
        self._lease.append(self._tokens)
        for request in self.requests:
            request.n_computed += 1
            request.n_steps += 1
        return Chosen(checked(found), {})

    def _renew(self, cache: CacheManager) -> bool:
        """Takes a new lease: a block is full, or another sequence has changed the cache."""
        if any(request.is_full for request in self.requests):
            return False
        sequences = [request.sequence for request in self.requests if request.sequence is not None]
        assert len(sequences) == len(self.requests)
        self._lease = None
        lease = cache.lease(sequences)
        if lease is None:
            return False
        self._run.place(lease)
        self._lease = lease
        self._ends = [
            end if request.shift is None else min(end, request.shift.n_ctx)
            for request, end in zip(self.requests, lease.ends, strict=True)
        ]
        return True
