"""The manager's results: frozen, and of plain numbers."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from motley.kvcache.prefix import PrefixStats
from motley.kvcache.sequences import BlockCopy, GroupStats


@dataclass(frozen=True, slots=True)
class Opened:
    """A new sequence, whose first `n_cached` tokens need not be computed once `copies` are made."""

    seq: int
    n_cached: int
    n_wanted: int  # tokens that were looked for
    copies: list[BlockCopy]


@dataclass(frozen=True, slots=True)
class Restored:
    """A sequence to be filled: per group, the first token to store and the slots from it to the last token."""

    seq: int
    firsts: tuple[int, ...]
    slots: tuple[list[int], ...]


class TableView(NamedTuple):
    """A sequence's blocks in one group, HOLE for dropped ones. To be read or copied at once, not kept.

    As long as `version` is the same, the table has only grown: entries seen before need not be read again.
    """

    blocks: array[int]  # int32
    n_holes: int  # leading entries that are HOLE
    n_tokens: int
    version: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The cache at one moment."""

    block_size: int
    n_sequences: int
    n_tokens: int  # the sum of the sequences' lengths: shared tokens count once per sequence
    groups: tuple[GroupStats, ...]
    prefix: PrefixStats
