"""`Batch`: tokens of any number of sequences that go through the model together. There are no phases, only tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from motley.kvcache.arena import GroupBatch
from motley.models import BatchShape


class Chunk(NamedTuple):
    """The next tokens of one sequence, whichever they are; the last `n_outputs` rows want logits."""

    sequence: int
    start: int  # position of the first token
    n_tokens: int
    n_outputs: int


@dataclass(frozen=True)
class Batch:
    """Chunks side by side; a sequence has at most one."""

    chunks: tuple[Chunk, ...]

    @staticmethod
    def of(chunks: Iterable[Chunk]) -> Batch:
        batch = Batch(tuple(chunks))
        assert len({c.sequence for c in batch.chunks}) == len(batch.chunks), "a sequence has two chunks"
        assert all(0 <= c.n_outputs <= c.n_tokens for c in batch.chunks), "more outputs than tokens"
        return batch

    @property
    def n_tokens(self) -> int:
        return sum(c.n_tokens for c in self.chunks)

    @property
    def n_outputs(self) -> int:
        return sum(c.n_outputs for c in self.chunks)

    def positions(self) -> list[int]:
        return [c.start + i for c in self.chunks for i in range(c.n_tokens)]

    def output_rows(self) -> list[int]:
        """Rows that want logits, in the order of chunks."""
        rows: list[int] = []
        end = 0
        for c in self.chunks:
            end += c.n_tokens
            rows.extend(range(end - c.n_outputs, end))
        return rows


@dataclass(frozen=True)
class PlacedBatch:
    """A batch that lacks nothing but its tokens: they may still be in the making. See `Runner.place`."""

    shape: BatchShape
    inputs: Mapping[str, torch.Tensor]  # int32, by name
    cache: tuple[GroupBatch, ...]  # where it writes and reads, in each group of layers
