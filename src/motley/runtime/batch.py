"""`Batch`: tokens of any number of sequences that go through the model together. There are no phases, only tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Chunk(NamedTuple):
    """The next tokens of one sequence; its last `n_outputs` rows want logits."""

    sequence: int
    start: int  # position of the first token
    tokens: tuple[int, ...]
    n_outputs: int


@dataclass(frozen=True)
class Batch:
    """Chunks side by side; a sequence has at most one."""

    chunks: tuple[Chunk, ...]

    @staticmethod
    def of(chunks: Iterable[Chunk]) -> Batch:
        batch = Batch(tuple(chunks))
        assert len({c.sequence for c in batch.chunks}) == len(batch.chunks), "a sequence has two chunks"
        assert all(0 <= c.n_outputs <= len(c.tokens) for c in batch.chunks), "more outputs than tokens"
        return batch

    @property
    def n_tokens(self) -> int:
        return sum(len(c.tokens) for c in self.chunks)

    @property
    def n_outputs(self) -> int:
        return sum(c.n_outputs for c in self.chunks)

    def tokens(self) -> list[int]:
        return [token for c in self.chunks for token in c.tokens]

    def positions(self) -> list[int]:
        return [c.start + i for c in self.chunks for i in range(len(c.tokens))]

    def output_rows(self) -> list[int]:
        """Rows that want logits, in the order of chunks."""
        rows: list[int] = []
        end = 0
        for c in self.chunks:
            end += len(c.tokens)
            rows.extend(range(end - c.n_outputs, end))
        return rows
