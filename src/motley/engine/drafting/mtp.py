"""The MTP drafter: the model's own multi-token prediction layer (nextn), with a cache of its own.

The layer takes pairs: the hidden state of a token, which the model has computed, and the token that follows. From the
pair of the latest two tokens it guesses the next one; with its own hidden state and its guess it continues. Pairs of
the prompt are computed as well, so that it attends to the whole text. Where hidden states are missing, because blocks
were a prefix hit or the context has shifted, its context begins later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from motley.engine.drafting.draft import Draft, DraftRequest
from motley.engine.drafting.rounds import Lane, RoundChooser
from motley.engine.request import Request
from motley.kvcache.manager import CacheManager
from motley.runtime import Batch, Chunk, Runner

_MANY = 64  # rows: so many pairs are computed even if no draft needs them yet


@dataclass
class _RequestCache:
    """A request's pairs in the layer's cache, and the hidden states of the next ones."""

    sequence: int
    base: int  # the position of its first pair's hidden state
    n_pairs: int = 0  # computed, with certain tokens
    waiting: list[torch.Tensor] = field(default_factory=list)  # hidden states, (rows, embd) each

    @property
    def first(self) -> int:
        """The position of the first hidden state that waits."""
        return self.base + self.n_pairs

    @property
    def n_waiting(self) -> int:
        return sum(map(len, self.waiting))

    def trim(self, n_computed: int) -> None:
        """Drops hidden states of drafted tokens that were wrong."""
        n_valid = max(0, n_computed - self.first)
        if self.n_waiting > n_valid:
            self.waiting = [torch.cat(self.waiting)[:n_valid]]


class NextnLayer:
    """Drafts with the multi-token prediction layer."""

    name = "mtp"
    priors = (0.7,)
    is_free = False
    writes_cache = False

    def __init__(self, runner: Runner, cache: CacheManager, *, n_ctx: int, n_batch: int) -> None:
        self.runner = runner
        self._cache = cache
        self._n_ctx, self._n_batch = n_ctx, n_batch
        self._rounds = RoundChooser()
        self._request_caches: dict[Request, _RequestCache] = {}
        self._hidden: dict[Request, torch.Tensor] = {}  # inputs of the next round
        self.is_usual = False

    def observe(self, request: Request, start: int, hidden: torch.Tensor) -> None:
        """Takes the hidden states of a request's tokens from position `start` on, drafted ones included."""
        own = self._request_caches.get(request)
        if own is None:
            own = self._request_caches[request] = _RequestCache(self._cache.open().seq, start)
        own.trim(start)
        if own.first + own.n_waiting != start:  # computed again, or shifted
            self._restart(own, start)
        own.waiting.append(hidden.clone())

    def catch_up(self, requests: Iterable[Request]) -> None:
        """Computes pairs of prompts, whose hidden states would take memory otherwise."""
        self._free_ended()
        for request in requests:
            own = self._request_caches.get(request)
            if own is not None and own.n_waiting >= _MANY:
                self._compute(request, own, n_kept=1)

    def draft(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        n_plans = self.runner.n_plans
        lanes = [lane for ask in asks if (lane := self._lane(ask)) is not None]
        self._rounds.draft(lanes, self._run)
        self._hidden.clear()
        self.is_usual = self.runner.n_plans == n_plans
        drafted = {lane.request: tuple(lane.drafted) for lane in lanes}
        return [Draft(drafted.get(ask.request, ()), self.name) for ask in asks]

    def may_draft(self, request: Request) -> bool:
        return True

    def give_back(self) -> None:
        self._free_ended()
        self.runner.give_back(self._cache.take_emptied())

    def forget(self, tokens: Sequence[int], salt: bytes) -> None:
        self._free_ended()
        self._cache.unpublish(tokens, salt=salt)

    def close(self) -> None:
        self.runner.close()

    def _lane(self, ask: DraftRequest) -> Lane | None:
        """The request's lane: its pairs since the latest draft, and room for the next ones."""
        request, own = ask.request, self._request_caches.get(ask.request)
        if own is None:
            return None
        own.trim(request.n_computed)
        if own.first + own.n_waiting != len(request.tokens) - 1 or not own.n_waiting:
            return None  # hidden states are missing
        self._compute(request, own, n_kept=self._n_batch)
        n_new = own.n_waiting + ask.n_max
        if own.n_pairs + n_new > self._n_ctx or not self._reserve(own, n_new):
            self._restart(own, len(request.tokens) - 1)
            return None
        self._hidden[request] = torch.cat(own.waiting)
        return Lane(request, ask.n_max, own.sequence, own.n_pairs, request.tokens[own.first + 1 :])

    def _compute(self, request: Request, own: _RequestCache, n_kept: int) -> None:
        """Computes pairs whose tokens are known, until at most `n_kept` wait."""
        own.trim(request.n_computed)
        n_known = min(own.n_waiting, len(request.tokens) - 1 - own.first)
        hidden = torch.cat(own.waiting) if own.waiting else torch.empty(0)
        while (n := min(self._n_batch, n_known - n_kept)) > 0:
            if own.n_pairs + n > self._n_ctx or not self._reserve(own, n):
                self._restart(own, request.n_computed)
                return
            tokens = request.tokens[own.first + 1 : own.first + 1 + n]
            batch = self.runner.place(
                Batch.of([Chunk(own.sequence, own.n_pairs, n, 0)], keeps_hidden=True), self._cache
            )
            self.runner.run(batch, tokens, (), hidden[:n])
            self._cache.commit(own.sequence, tokens)
            own.n_pairs, n_known, hidden = own.n_pairs + n, n_known - n, hidden[n:]
            own.waiting = [hidden] if len(hidden) else []

    def _run(self, lanes: Sequence[Lane]) -> torch.Tensor:
        chunks = [Chunk(lane.sequence, lane.start, len(lane.pending), 1) for lane in lanes]
        batch = self.runner.place(Batch.of(chunks, keeps_hidden=True), self._cache)
        tokens = [token for lane in lanes for token in lane.pending]
        logits = self.runner.run(batch, tokens, (), torch.cat([self._hidden[lane.request] for lane in lanes]))
        assert self.runner.hidden is not None
        end = 0
        for lane in lanes:
            end += len(lane.pending)
            self._cache.commit(lane.sequence, lane.pending)
            self._hidden[lane.request] = self.runner.hidden[end - 1 : end].clone()
            own = self._request_caches[lane.request]
            if not lane.drafted:  # the tokens of later rounds are guesses
                own.n_pairs += len(lane.pending)
                own.waiting.clear()
        return logits

    def _reserve(self, own: _RequestCache, n_tokens: int) -> bool:
        """Reserves slots after the certain pairs. Sequences of requests that are not running may lose theirs."""
        self._cache.truncate(own.sequence, own.n_pairs)
        self._cache.advance(own.sequence, own.n_pairs)
        while self._cache.reserve(own.sequence, n_tokens) is None:
            idle = [other for other in self._request_caches if other.sequence is None]
            if not idle:
                return False
            self._free(idle[:1])
        return True

    def _restart(self, own: _RequestCache, start: int) -> None:
        """Forgets all pairs: the context begins with the hidden state at `start`."""
        self._cache.truncate(own.sequence, 0)
        own.base, own.n_pairs = start, 0
        own.waiting.clear()

    def _free_ended(self) -> None:
        self._free([request for request in self._request_caches if request.is_finished])

    def _free(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._cache.free(self._request_caches.pop(request).sequence)
