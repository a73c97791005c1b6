"""A sequence without a request: tokens in, logits out. For scoring texts and for measuring."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType

import torch

from motley.errors import RequestError
from motley.kvcache.manager import CacheManager
from motley.kvcache.sequences import BlockCopy
from motley.runtime import MAX_LOGIT_ROWS, Batch, Chunk, Runner


class BareSequence:
    """Feed it tokens, in any portions; close it (it is a context manager) to free its cache."""

    def __init__(self, runner: Runner, cache: CacheManager, n_batch: int, n_vocab: int) -> None:
        self._runner = runner
        self._cache = cache
        self._n_batch = n_batch
        self._n_vocab = n_vocab
        # Under a salt of its own, nobody else finds its blocks: what `pretend` stores belongs to no text.
        self._sequence = cache.open(salt=os.urandom(16)).seq
        self._is_open = True

    def feed(self, tokens: Sequence[int], n_outputs: int | None = None) -> torch.Tensor:
        """Compute the next tokens; logits of the last `n_outputs` of each portion of up to `n_batch` (default: all)."""
        self._check(tokens)
        rows = []
        n_portion = self._n_batch if n_outputs is not None else min(self._n_batch, MAX_LOGIT_ROWS)
        for start in range(0, len(tokens), n_portion):
            part = tuple(tokens[start : start + n_portion])
            n_rows = len(part) if n_outputs is None else min(n_outputs, len(part))
            rows.append(self._run(part, n_rows).to("cpu", copy=True))
        return torch.cat(rows)

    def follow(self, token: int) -> int:
        """Compute one more token; the likeliest next one, chosen where the logits are."""
        self._check([token])
        return int(self._run([token], 1).argmax())

    def pretend(self, n_tokens: int) -> None:
        """Go on as if `n_tokens` had been fed: their keys and values are random."""
        done = 0
        while done < n_tokens:
            n = min(self._n_batch, n_tokens - done)
            self._reserve(n)
            self._runner.store_random(self._cache, self._sequence, n)
            self._cache.commit(self._sequence, [0] * n)
            done += n

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._cache.free(self._sequence)
            self._runner.give_back(self._cache.take_emptied())

    def __enter__(self) -> BareSequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, tokens: Sequence[int]) -> None:
        if not tokens or not all(0 <= token < self._n_vocab for token in tokens):
            raise RequestError(f"needs token ids from 0 to {self._n_vocab - 1}, at least one")

    def _run(self, tokens: Sequence[int], n_outputs: int) -> torch.Tensor:
        """Logits of the last `n_outputs`, on their device, until the next run."""
        copies = self._reserve(len(tokens))
        chunk = Chunk(self._sequence, self._cache.n_tokens(self._sequence), len(tokens), n_outputs)
        logits = self._runner.run(self._runner.place(Batch.of([chunk]), self._cache), tokens, copies)
        self._cache.commit(self._sequence, tokens)
        return logits

    def _reserve(self, n_tokens: int) -> list[BlockCopy]:
        self._cache.advance(self._sequence, self._cache.n_tokens(self._sequence))
        room = self._cache.reserve(self._sequence, n_tokens)
        if room is None:
            n_stored = self._cache.n_tokens(self._sequence)
            raise RequestError(
                f"no room in the KV cache for {n_tokens} tokens after {n_stored}",
                hint="raise n_ctx (-c) or the cache's limit, or let requests finish",
            )
        return room
