"""Feeds a model by hand: any sequences, any chunks, side by side in one batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch

from motley import LLM
from motley.runtime import Batch, Chunk


class ModelDriver:
    """A model on the reference backend with a float32 cache, and sequences that grow step by step.

    `LLM` wires the parts. The driver takes the runner and the cache out of it and stands in for the engine,
    which chooses batches by itself and shows the logits of one sequence only.
    """

    def __init__(self, path: Path, n_ctx: int, shares: Sequence[int] = (1,)) -> None:
        self.path = path
        self._llm = LLM(
            path,
            n_ctx=n_ctx,
            n_batch=n_ctx,
            n_parallel=4,
            cache_type_k="f32",
            cache_type_v="f32",
            kv_block_size=16,
            backend="reference",
            devices=["cpu"] * len(shares),
            split_mode="tensor",
            tensor_split=shares,
        )
        self._runner, self._cache = self._llm._loaded.runner, self._llm._loaded.cache
        self._lengths: dict[int, int] = {}

    def open(self) -> int:
        """A new sequence, which finds nothing in the cache."""
        sequence = self._cache.open().seq
        self._lengths[sequence] = 0
        return sequence

    def free(self, sequence: int) -> None:
        self._cache.free(sequence)
        del self._lengths[sequence]

    def close(self) -> None:
        self._llm.close()

    def step(self, work: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Run the next tokens of each sequence in one batch. Logits (tokens, vocab) of each."""
        chunks, copies = [], []
        for sequence, tokens in work.items():
            start = self._lengths[sequence]
            self._cache.advance(sequence, start)
            room = self._cache.reserve(sequence, len(tokens))
            assert room is not None, "the test's cache is too small"
            copies.extend(room)
            chunks.append(Chunk(sequence, start, len(tokens), len(tokens)))
        placed = self._runner.place(Batch.of(chunks), self._cache)
        logits = self._runner.run(placed, [t for tokens in work.values() for t in tokens], copies).clone()
        for sequence, tokens in work.items():
            self._cache.commit(sequence, tokens)
            self._lengths[sequence] += len(tokens)
        return dict(zip(work, torch.split(logits, [len(t) for t in work.values()]), strict=True))

    def logits(self, tokens: Sequence[int], chunk_sizes: Iterable[int] | None = None) -> torch.Tensor:
        """(tokens, vocab) of a text as a sequence of its own; all at once unless `chunk_sizes` are given."""
        sequence, rows, start = self.open(), [], 0
        for size in chunk_sizes or [len(tokens)]:
            rows.append(self.step({sequence: tokens[start : start + size]})[sequence])
            start += size
        self.free(sequence)
        return torch.cat(rows)


def logits_of(path: Path, tokens: Sequence[int], n_ctx: int) -> torch.Tensor:
    """(tokens, vocab) from a model that is only opened for this."""
    with closing(ModelDriver(path, n_ctx)) as driver:
        return driver.logits(tokens)
