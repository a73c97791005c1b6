"""Drives a model's runner and cache by hand, in the engine's place: any chunks, drafts that are rejected, any cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from motley import LLM
from motley.kvcache.sequences import BlockCopy
from motley.runtime import Batch, Chunk


class CacheDriver:
    """One `LLM` on the reference backend, with f32 K and V unless told otherwise."""

    def __init__(self, path: Path, **options: Any) -> None:
        plain = {"cache_type_k": "f32", "cache_type_v": "f32", "backend": "reference", "n_parallel": 2}
        self.llm = LLM(path, **(plain | options))
        self.cache, self.runner = self.llm._loaded.cache, self.llm._loaded.runner
        self._pending: list[BlockCopy] = []

    def open(self, tokens: Sequence[int] = (), checkpoints: Sequence[int] = ()) -> tuple[int, int]:
        """A sequence, and how many of `tokens` it has found in the cache."""
        opened = self.cache.open(tokens, checkpoints=checkpoints)
        self._pending = opened.copies
        return opened.seq, opened.n_cached

    def feed(self, sequence: int, tokens: Sequence[int], n_accepted: int | None = None) -> torch.Tensor:
        """Run the next tokens of which only the first `n_accepted` are kept. Logits (tokens, vocab)."""
        start = self.cache.n_tokens(sequence)
        self.cache.advance(sequence, start)
        n_uncertain = 0 if n_accepted is None else len(tokens) - n_accepted
        room = self.cache.reserve(sequence, len(tokens), n_uncertain=n_uncertain)
        assert room is not None, "the test's cache is too small"
        batch = Batch.of([Chunk(sequence, start, len(tokens), len(tokens))])
        copies = [*self._pending, *room]
        self._pending = []
        logits = self.runner.run(self.runner.place(batch, self.cache), tokens, copies).clone()
        self.cache.commit(sequence, tokens[:n_accepted])
        self.cache.check_integrity()
        return logits

    def prompt(self, tokens: Sequence[int], checkpoints: Sequence[int] = ()) -> tuple[int, int, torch.Tensor]:
        """A sequence of all `tokens`, how many it has found, and the logits of the others."""
        sequence, n_cached = self.open(tokens, checkpoints)
        rows, start = [], n_cached
        while start < len(tokens):
            n_tokens = self.cache.n_before_checkpoint(sequence, len(tokens) - start)
            rows.append(self.feed(sequence, tokens[start : start + n_tokens]))
            start += n_tokens
        return sequence, n_cached, torch.cat(rows)

    def logits(self, tokens: Sequence[int], chunks: Iterable[int]) -> torch.Tensor:
        """(tokens, vocab) of a sequence of its own, fed in chunks of these sizes until there are no more."""
        sequence, _ = self.open()
        rows, start = [], 0
        for size in chunks:
            rows.append(self.feed(sequence, tokens[start : start + size]))
            start += size
            if start >= len(tokens):
                break
        self.cache.free(sequence)
        return torch.cat(rows)

    def n_used(self) -> list[int]:
        """Blocks in use, of each group."""
        return [group.n_used for group in self.cache.stats().groups]

    def close(self) -> None:
        self.llm.close()
