"""`Lease`: sequences that grow by a few tokens at a time, without a `reserve` for each. Imports no torch.

Nearly always the next token of a sequence goes to a block that the sequence already has. A lease says up to which
position this holds, for each of several sequences. It ends when any block table of the cache changes: then the manager
gives a new one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from motley.kvcache.prefix import Timeline


class LeasedTable(NamedTuple):
    """A sequence's blocks in one group."""

    first: int  # the position that `blocks` begin at
    blocks: array[int]  # int32, a copy


class LeasedSequence(Protocol):
    """The part of a sequence that a lease changes."""

    past: Timeline
    n_slots: int


class LeaseSource(Protocol):
    """The part of `CacheManager` that a lease uses."""

    block_size: int
    n_changes: int

    def publish(self, sequence: Any, n_before: int) -> None: ...


class Lease:
    """The right to append tokens to some sequences, at positions before `ends`: `CacheManager.lease`."""

    __slots__ = ("_n_changes", "_n_slots", "_sequences", "_source", "ends", "tables")

    def __init__(
        self,
        source: LeaseSource,
        sequences: Sequence[LeasedSequence],
        ends: list[int],
        n_slots: list[int],
        tables: list[list[LeasedTable]],
    ) -> None:
        """`n_slots`: of each sequence's blocks; at least `ends`. `tables`: for each layer group, one table for each
        sequence.
        """
        self._source = source
        self._n_changes = source.n_changes
        self._sequences = sequences
        self._n_slots = n_slots
        self.ends = ends
        self.tables = tables

    @property
    def is_valid(self) -> bool:
        return self._n_changes == self._source.n_changes

    @property
    def block_size(self) -> int:
        return self._source.block_size

    def reserve(self, counts: Sequence[int]) -> bool:
        """Reserves slots for so many tokens of each sequence, which may be left out of the next `commit`:
        `CacheManager.reserve` for all of them. False, and no change at all: their blocks do not reach so far.
        """
        ends = [len(sequence.past.tokens) + n for sequence, n in zip(self._sequences, counts, strict=True)]
        for end, n_slots in zip(ends, self._n_slots, strict=True):
            if end > n_slots:
                return False
        for sequence, end in zip(self._sequences, ends, strict=True):
            if sequence.n_slots < end:
                sequence.n_slots = end
        return True

    def append(self, tokens: Sequence[int]) -> None:
        """Commits the next token of each sequence, whose K/V are in its slot: `CacheManager.commit` for all of them."""
        n_last = self._source.block_size - 1
        for sequence, token in zip(self._sequences, tokens, strict=True):
            known = sequence.past.tokens
            n_before = len(known)
            known.append(token)
            if sequence.n_slots <= n_before:
                sequence.n_slots = n_before + 1
            n_inside = n_before & n_last  # block sizes are powers of two
            if not n_inside or n_inside == n_last:  # elsewhere there is nothing new to publish
                self._source.publish(sequence, n_before)
