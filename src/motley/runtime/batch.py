"""`Batch`: tokens of any number of sequences that go through the model together. There are no phases, only tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from motley.kvcache.arena import CacheBatch
from motley.models import BatchShape


class Chunk(NamedTuple):
    """The next tokens of one sequence (prompt or generated); logits are computed for the last `n_outputs` rows."""

    sequence: int
    start: int  # position of the first token
    n_tokens: int
    n_outputs: int
    n_experts: int = 0  # experts that each token uses; 0: the number in the model file
    n_layers: int = 0  # number of layers that run; 0: all
    # If its rows are a tree: for each the bits of the rows that it sees, itself too. Empty: it sees all before it.
    seen: tuple[int, ...] = ()


@dataclass(frozen=True)
class Batch:
    """The chunks of one batch, at most one for each sequence. All chunks run the same layers."""

    chunks: tuple[Chunk, ...]
    wants_hidden: bool = False  # the output rows are hidden states instead of logits
    keeps_hidden: bool = False  # the hidden states of all rows are a second output
    n_best: int = 0  # of the largest logits of each row that are needed; 0: all

    @staticmethod
    def of(
        chunks: Iterable[Chunk], *, wants_hidden: bool = False, keeps_hidden: bool = False, n_best: int = 0
    ) -> Batch:
        batch = Batch(tuple(chunks), wants_hidden, keeps_hidden, n_best)
        assert len({c.sequence for c in batch.chunks}) == len(batch.chunks), "a sequence has two chunks"
        assert all(0 <= c.n_outputs <= c.n_tokens for c in batch.chunks), "more outputs than tokens"
        assert all(len(c.seen) in (0, c.n_tokens) for c in batch.chunks), "a tree has a mask for each row"
        assert len({c.n_layers for c in batch.chunks}) <= 1, "chunks run different layers"
        return batch

    @property
    def n_tokens(self) -> int:
        return sum(c.n_tokens for c in self.chunks)

    @property
    def n_outputs(self) -> int:
        return sum(c.n_outputs for c in self.chunks)

    @property
    def n_layers(self) -> int:
        """The number of layers that run; 0: all."""
        return self.chunks[0].n_layers if self.chunks else 0

    def n_experts(self, default: int) -> list[int]:
        """The number of experts of each token; `default` where its chunk has 0."""
        return [c.n_experts or default for c in self.chunks for _ in range(c.n_tokens)]

    def positions(self) -> list[int]:
        positions: list[int] = []
        for c in self.chunks:
            if c.seen:
                positions.extend(c.start + mask.bit_count() - 1 for mask in c.seen)
            else:
                positions.extend(range(c.start, c.start + c.n_tokens))
        return positions

    def output_rows(self) -> list[int]:
        """The rows for which logits are computed, in the order of chunks."""
        rows: list[int] = []
        end = 0
        for c in self.chunks:
            end += c.n_tokens
            rows.extend(range(end - c.n_outputs, end))
        return rows


Numbers = torch.Tensor | list[int]  # int32; a list where all backends take one


@dataclass(frozen=True)
class PlacedBatch:
    """A batch that is complete except for its token ids, which may not be computed yet. See `Runner.place`."""

    shape: BatchShape
    inputs: Mapping[str, Numbers]  # by name
    cache: tuple[CacheBatch, ...]  # the slots and block tables of each group of layers
    n_best: int = (
        0  # so many of a row's largest logits are needed, and other processes need not send more; 0: all
    )
