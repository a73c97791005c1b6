"""The draft model: a smaller model with the same vocabulary, with its own cache on the same devices.

For each request it has a sequence. Before a draft, the sequence goes back to the tokens that it has in common with the
request, and takes the tokens that the request got since. A prompt is taken in portions of one batch a step; the next
turn of a chat finds the blocks of the turns before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from motley.engine.drafting.draft import Draft, DraftRequest
from motley.engine.drafting.rounds import Lane, RoundChooser
from motley.engine.request import Request
from motley.kvcache.groups import BlockCopy
from motley.kvcache.manager import CacheManager
from motley.runtime import Batch, Chunk, Runner


@dataclass
class _Sequence:
    """A request's tokens in the draft model's cache."""

    number: int
    tokens: list[int] = field(default_factory=list)
    n_sure: int = 0  # tokens that are certainly the request's: it had them when they were computed


class DraftModel:
    """Drafts with a model of its own."""

    name = "draft"
    priors = (0.85,)
    is_free = False
    writes_cache = False

    def __init__(
        self, runner: Runner, cache: CacheManager, *, n_ctx: int, n_vocab: int, n_batch: int
    ) -> None:
        self.runner = runner
        self._cache = cache
        self._n_ctx, self._n_vocab, self._n_batch = n_ctx, n_vocab, n_batch
        self._rounds = RoundChooser()
        self._sequences: dict[Request, _Sequence] = {}
        self.is_usual = False

    def draft(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        n_plans = self.runner.n_plans
        self._free_ended()
        asked = [lane for ask in asks if (lane := self._lane(ask)) is not None]
        lanes = self._caught_up(asked)
        is_prompt = len(lanes) < len(asked) or any(len(lane.pending) > lane.n_max + 1 for lane in lanes)
        self._rounds.draft(lanes, self._run, self._run_rounds)
        self.is_usual = self.runner.n_plans == n_plans and not is_prompt
        drafted = {lane.request: tuple(lane.drafted) for lane in lanes}
        return [Draft(drafted.get(ask.request, ()), self.name) for ask in asks]

    def may_draft(self, request: Request) -> bool:
        has_room = len(request.tokens) + 2 <= self._n_ctx  # its next token, and a drafted one
        return has_room and max(request.sampler.params.logit_bias, default=0) < self._n_vocab

    def give_back(self) -> None:
        self._free_ended()
        self.runner.give_back(self._cache.take_emptied())

    def forget(self, tokens: Sequence[int], salt: bytes) -> None:
        self._free_ended()
        self._cache.unpublish(tokens, salt=salt)

    def close(self) -> None:
        self.runner.close()

    def _lane(self, ask: DraftRequest) -> Lane | None:
        """The request's lane, its sequence truncated to what it has in common with the request."""
        request = ask.request
        n_max = min(ask.n_max, self._n_ctx - len(request.tokens))
        if n_max <= 0:
            return None
        own = self._sequences.get(request)
        if own is None:
            own = self._opened(request)
        n_common = self._n_common(own, request)
        # The model's vocabulary may have more tokens at its end.
        if max([*request.tokens[n_common:], *request.sampler.params.logit_bias]) >= self._n_vocab:
            return None
        size = self._cache.block_size
        for n_kept in (n_common, n_common - n_common % size):
            own = self._back_to(request, n_kept)
            pending = request.tokens[len(own.tokens) : len(own.tokens) + self._n_batch]
            copies = self._reserved(request, len(pending) + n_max)
            if copies is None:
                return None
            if not copies:
                return Lane(request, n_max, own.number, len(own.tokens), pending)
            # Other sequences have the last block, too: its tokens are computed again, in a block of its own.
        raise AssertionError("there is nothing to copy at a block's end")

    def _back_to(self, request: Request, n_tokens: int) -> _Sequence:
        """The request's sequence, truncated; empty if a window has dropped what is needed there."""
        own = self._sequences[request]
        if not self._cache.can_truncate(own.number, n_tokens):
            self._cache.free(own.number, copies_done=False)
            own = self._sequences[request] = _Sequence(self._cache.open().seq)
            n_tokens = 0
        self._cache.truncate(own.number, n_tokens)
        del own.tokens[n_tokens:]
        own.n_sure = n_tokens
        return own

    def _opened(self, request: Request) -> _Sequence:
        """A new sequence, with the request's tokens as far as they are in the cache."""
        opened = self._cache.open(request.tokens, salt=request.salt, find=request.cache_prompt)
        own = self._sequences[request] = _Sequence(opened.seq, list(request.tokens[: opened.n_cached]))
        if (
            opened.copies
        ):  # of a block's first tokens: not worth a copy, which must be made before anything else
            return self._back_to(request, opened.n_cached - opened.n_cached % self._cache.block_size)
        own.n_sure = opened.n_cached
        return own

    def _reserved(self, request: Request, n_tokens: int) -> list[BlockCopy] | None:
        """Reserves slots for a request's next tokens: what would have to be copied before; None: there is no room.

        Sequences of requests that are not running may lose theirs.
        """
        own = self._sequences[request]
        self._cache.advance(own.number, len(own.tokens))
        while (copies := self._cache.reserve(own.number, n_tokens)) is None:
            idle = [other for other in self._sequences if other.sequence is None]
            if not idle:
                return None
            self._free(idle[:1])
        return copies

    def _n_common(self, own: _Sequence, request: Request) -> int:
        """The tokens at the start that both have, at most all of the request's but the last, which gives logits."""
        # A context shift removes tokens from the middle.
        n = own.n_sure if request.shift is None else 0
        max_tokens = min(len(own.tokens), len(request.tokens) - 1)
        while n < max_tokens and own.tokens[n] == request.tokens[n]:
            n += 1
        return min(n, max_tokens)

    def _caught_up(self, lanes: Sequence[Lane]) -> list[Lane]:
        """The lanes that can have a draft now. The first of the others takes a batch of the tokens that it lacks."""
        kept, room = [], self._n_batch
        for lane in sorted(lanes, key=lambda lane: len(lane.request.tokens) - lane.start):
            n_missing = len(lane.request.tokens) - lane.start
            if n_missing <= room:
                room -= n_missing
                kept.append(lane)
            else:  # also beside lanes that have drafts: a long prompt would wait until these end
                self._run([lane], n_outputs=0)
                break
        return kept

    def _run(self, lanes: Sequence[Lane], n_outputs: int = 1) -> torch.Tensor:
        chunks = [Chunk(lane.sequence, lane.start, len(lane.pending), n_outputs) for lane in lanes]
        batch = self.runner.place(Batch.of(chunks), self._cache)
        logits = self.runner.run(batch, [token for lane in lanes for token in lane.pending], ())
        for lane in lanes:
            self._commit(lane)
        return logits

    def _run_rounds(
        self, lanes: Sequence[Lane], settings: Sequence[Any], indexes: Sequence[int], n_rounds: int
    ) -> list[list[int]] | None:
        chunks = [Chunk(lane.sequence, lane.start, 1, 1) for lane in lanes]
        batch = self.runner.place(Batch.of(chunks), self._cache, n_rounds)
        rounds = self.runner.draft(batch, [lane.pending[0] for lane in lanes], settings, indexes, n_rounds)
        if rounds is not None:
            for i, lane in enumerate(lanes):
                self._commit(lane, [tokens[i] for tokens in rounds[:-1]])
        return rounds

    def _commit(self, lane: Lane, drafted: Sequence[int] = ()) -> None:
        """Records that a lane's pending tokens were computed, and then those of further rounds."""
        own = self._sequences[lane.request]
        own.tokens += lane.pending
        if not lane.drafted:
            own.n_sure = len(own.tokens)
        own.tokens += drafted
        self._cache.commit(lane.sequence, [*lane.pending, *drafted])

    def _free_ended(self) -> None:
        self._free([request for request in self._sequences if request.is_finished])

    def _free(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._cache.free(self._sequences.pop(request).number)
