"""A sequence without a request: tokens in, logits out. Used for scoring, sessions and benchmarks."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol, TypeVar

import torch

from motley.engine.effort import Effort
from motley.engine.engine import Engine
from motley.errors import RequestError
from motley.kvcache.groups import BlockCopy
from motley.runtime import MAX_LOGIT_ROWS, Batch, Chunk

T = TypeVar("T")


class Owner(Protocol):
    """The thread that owns runner and cache (engine.service.EngineService)."""

    def call(self, work: Callable[[], T]) -> T:
        """The result of `work()`, run on that thread between two steps."""
        ...

    def post(self, work: Callable[[], object]) -> None:
        """Schedules `work()` on that thread and returns at once."""
        ...


class RawSequence:
    """A sequence to feed tokens to, in any portions. Close it (it is a context manager) to free its cache.

    Each portion of up to `n_batch` tokens runs between two steps of the engine, so that requests continue meanwhile.
    """

    def __init__(
        self,
        owner: Owner,
        engine: Engine,
        *,
        prefix: Sequence[int] | None = None,
        is_internal: bool = False,
        effort: Effort | None = None,
    ) -> None:
        """`prefix`: begin with the prefix hit of these tokens, and publish the blocks that are fed. Without it no block
        is shared or published: `fill_with_random` stores values that belong to no text. `is_internal`: the sequence
        ends without action of the user, so requests without room wait for its end, and it may preempt requests.
        `effort`: the experts and layers that it uses; default: those of requests.
        """
        self._owner = owner
        self._engine = engine
        self._runner, self._cache = engine.runner, engine.cache
        engine.wait_for_kernels()
        self._n_batch = engine.scheduler.n_batch
        self._is_internal = is_internal
        self._effort = engine.efforts.default if effort is None else effort
        self._copies: list[BlockCopy] = []  # made before the next tokens are stored
        self._is_kept = prefix is not None
        self._is_running = False  # a batch that fails may have changed the sequence's states
        self.sequence: int | None = None  # while it is open; the owner's thread sets it
        self.n_cached = 0
        self.n_losses = 0  # of the engine, when it was opened
        self._is_open = True
        try:
            owner.call(lambda: self._open(prefix))
        except BaseException:
            self.close()  # comes behind `_open` in the inbox, should an interrupt have left that there
            raise

    def feed(self, tokens: Sequence[int], n_outputs: int | None = None) -> torch.Tensor:
        """Computes the next tokens. Returns logits of the last `n_outputs` (default: all) of each `n_batch` tokens."""
        tokens = self._checked(tokens)
        if n_outputs is not None and n_outputs < 0:
            raise RequestError(f"n_outputs is {n_outputs}", hint="it must be at least 0")
        rows = []
        n_portion = self._n_batch if n_outputs is not None else min(self._n_batch, MAX_LOGIT_ROWS)
        for start in range(0, len(tokens), n_portion):
            part = tuple(tokens[start : start + n_portion])
            n_rows = len(part) if n_outputs is None else min(n_outputs, len(part))
            rows.append(self._owner.call(partial(self._logits, part, n_rows)))
        return torch.cat(rows)

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Computes the next tokens. Returns the hidden state of each after the final norm. (tokens, embd)"""
        tokens = self._checked(tokens)
        n_portion = self._n_batch
        parts = [tuple(tokens[start : start + n_portion]) for start in range(0, len(tokens), n_portion)]
        return torch.cat([self._owner.call(partial(self._hidden, part)) for part in parts])

    def follow(self, token: int, n_tokens: int = 1) -> int:
        """Computes a token, then the likeliest next token, and so on, `n_tokens` in all. Returns the token after them.

        The argmax runs on the device of the logits, and no request runs in between.
        """
        self._checked([token])

        def work() -> int:
            latest = token
            for _ in range(n_tokens):
                latest = int(self._run([latest], 1, n_best=1).argmax())
            return latest

        return self._owner.call(work)

    def fill_with_random(self, n_tokens: int) -> None:
        """Extends the sequence by `n_tokens` with random keys and values, without computing them."""
        for start in range(0, n_tokens, self._n_batch):
            self._owner.call(partial(self._store_random, min(self._n_batch, n_tokens - start)))

    def close(self) -> None:
        """Frees its cache, without waiting for it."""
        if self._is_open:
            self._is_open = False
            self._owner.post(self._free)

    def __enter__(self) -> RawSequence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_is_open", False):
            self.close()

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        if not self._is_open:
            raise RequestError("this sequence is closed", hint="create a new sequence")
        try:
            ids = [operator.index(token) for token in tokens]
        except TypeError:
            raise RequestError("a sequence is fed with token ids, which are whole numbers") from None
        if not ids or not all(0 <= token < self._engine.n_vocab for token in ids):
            raise RequestError(f"needs token ids from 0 to {self._engine.n_vocab - 1}, at least one")
        return ids

    # On the owner's thread

    def _open(self, prefix: Sequence[int] | None) -> None:
        salt = os.urandom(16) if prefix is None else self._effort.salt
        opened = self._cache.open(prefix or (), salt=salt, checkpoints=None)
        self._copies = opened.copies
        self._engine.n_internal += self._is_internal
        self.sequence, self.n_cached = opened.seq, opened.n_cached
        self.n_losses = self._engine.n_losses

    def _opened(self) -> int:
        """The sequence's number. RequestError if it was closed meanwhile."""
        if self.sequence is None:
            raise RequestError("this sequence is closed", hint="create a new sequence")
        self._engine.require_no_loss(self.n_losses)
        return self.sequence

    def _logits(self, tokens: Sequence[int], n_outputs: int) -> torch.Tensor:
        return self._run(tokens, n_outputs).to("cpu", copy=True)

    def _hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._run(tokens, len(tokens), wants_hidden=True).to("cpu", copy=True)

    def _run(
        self, tokens: Sequence[int], n_outputs: int, *, wants_hidden: bool = False, n_best: int = 0
    ) -> torch.Tensor:
        """Logits or hidden states of the last `n_outputs` tokens, on their device. Valid until the next run.

        `n_best`: of the largest logits of each row that are read; 0: all.
        """
        sequence = self._opened()
        copies = [*self._copies, *self._reserve(len(tokens))]
        self._copies = copies
        start, effort = self._cache.n_tokens(sequence), self._effort
        chunk = Chunk(sequence, start, len(tokens), n_outputs, effort.n_experts, effort.n_layers)
        n_best = n_best if self._runner.sends_rows else 0
        batch = Batch.of([chunk], wants_hidden=wants_hidden, n_best=n_best)
        self._is_running = True
        output = self._runner.run(self._runner.place(batch, self._cache), list(tokens), copies)
        self._copies, self._is_running = [], False
        self._cache.commit(sequence, tokens)
        return output

    def _store_random(self, n_tokens: int) -> None:
        sequence = self._opened()
        self._reserve(n_tokens)
        self._runner.store_random(self._cache, sequence, n_tokens)
        self._cache.commit(sequence, [0] * n_tokens)

    def _reserve(self, n_tokens: int) -> list[BlockCopy]:
        sequence = self._opened()
        self._cache.advance(sequence, self._cache.n_tokens(sequence))
        while (room := self._cache.reserve(sequence, n_tokens)) is None:
            if self._is_internal and self._engine.preempt():
                continue
            n_stored = self._cache.n_tokens(sequence)
            raise RequestError(
                f"no room in the KV cache for {n_tokens} tokens after {n_stored}",
                hint="raise n_ctx (-c) or the cache's limit, or let requests finish",
            )
        return room

    def _free(self) -> None:
        sequence, self.sequence = self.sequence, None
        if sequence is not None:
            self._engine.n_internal -= self._is_internal
            is_kept = self._is_kept and not self._copies and not self._is_running
            self._cache.free(sequence, copies_done=is_kept)
            self._engine.give_back()
