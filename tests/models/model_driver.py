"""Feeds a model by hand: any sequences, any chunks, side by side in one batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import torch

from motley.backends import get_backend
from motley.gguf import read_spec
from motley.kvcache.manager import CacheManager
from motley.kvcache.sequences import GroupSpec
from motley.kvcache.types import get_cache_type
from motley.models import GraphOptions, read_params
from motley.runtime import Batch, Chunk, ModelSplit, Runner, make_crew

_BLOCK_SIZE = 16
_MAX_SEQUENCES = 4


class ModelDriver:
    """A model on the reference backend with a float32 cache, and sequences that grow step by step."""

    def __init__(self, path: Path, n_ctx: int) -> None:
        spec, cache_type = read_spec(path), get_cache_type("f32")
        n_blocks = _MAX_SEQUENCES * -(-n_ctx // _BLOCK_SIZE)
        split = ModelSplit(spec, read_params(spec), make_crew("cpu"), GraphOptions(n_ctx))
        self._runner = Runner(
            spec,
            split,
            get_backend("reference"),
            n_blocks=n_blocks,
            block_size=_BLOCK_SIZE,
            k_type=cache_type,
            v_type=cache_type,
        )
        self._cache = CacheManager([GroupSpec("full", n_blocks)], _BLOCK_SIZE)
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
        """Give back the model's memory and threads."""
        self._runner.close()

    def step(self, work: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Run the next tokens of each sequence in one batch. Logits (tokens, vocab) of each."""
        chunks, copies = [], []
        for sequence, tokens in work.items():
            start = self._lengths[sequence]
            self._cache.advance(sequence, start)
            room = self._cache.reserve(sequence, len(tokens))
            assert room is not None, "the test's cache is too small"
            copies.extend(room.copies)
            chunks.append(Chunk(sequence, start, tuple(tokens), len(tokens)))
        logits = self._runner.run(Batch.of(chunks), self._cache, copies).clone()
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
