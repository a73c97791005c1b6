"""The manager's interface to a group of layers, whether they keep K/V in blocks or a recurrent state in slots."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from motley.kvcache.blocks import BlockPool
from motley.kvcache.prefix import BlockHasher, PrefixSource, Timeline

ANY_NUMBER = 1 << 62  # of tokens: no limit
Table = TypeVar("Table")  # what a group knows of one sequence


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `n_tokens` slots of block `src` to block `dst`, in all layers of a group."""

    group: int
    src: int
    dst: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class BlockShift:
    """Move K/V between slots of a group: after `copies`, read all `sources`, then write them to `targets`.

    The keys' positions fall by `distance`; 0: the bits of keys and values stay the same.
    """

    group: int
    copies: list[BlockCopy]
    sources: list[int]
    targets: list[int]
    distance: int


@dataclass(frozen=True, slots=True)
class GroupStats:
    """One group's blocks, or one's state slots. Slots of tokens are counted in tokens."""

    name: str
    n_blocks: int
    n_used: int
    n_cached: int  # not used, but findable: evicted when room is needed
    n_shared: int
    n_slots_used: int  # slots of used blocks
    n_slots_wasted: int  # slots of used blocks that hold no token of any sequence
    is_state: bool = False  # "blocks" are slots of recurrent states

    @property
    def waste_percent(self) -> float:
        return 100 * self.n_slots_wasted / self.n_slots_used if self.n_slots_used else 0.0


class CacheGroup(ABC, Generic[Table]):
    """Layers that store the same tokens in the same way. All calls cost O(1) per block or slot that they touch."""

    number: int
    name: str
    unit: str  # of what `pool` counts: "blocks of 32 tokens"
    pool: BlockPool

    # What fits

    @property
    @abstractmethod
    def n_free_tokens(self) -> int:
        """How many tokens the empty and evictable part of the pool holds."""

    @property
    @abstractmethod
    def max_uncertain(self) -> int:
        """The most tokens at the end of a batch that may still be rejected."""

    @abstractmethod
    def n_needed(self, n_tokens: int, n_batch: int) -> int:
        """The most blocks or slots that a sequence of `n_tokens`, fed in batches of up to `n_batch`, holds at once."""

    @abstractmethod
    def has_room(self, table: Table, n_tokens: int, n_slots: int, n_uncertain: int = 0) -> bool:
        """Whether `extend` with the same arguments finds what it needs."""

    @abstractmethod
    def must_copy(self, table: Table, n_tokens: int) -> bool:
        """Whether `extend` would return copies."""

    def is_writable(self, table: Table, n_tokens: int, n_slots: int) -> bool:
        """Whether tokens n_tokens … n_slots - 1 can be written as it is: `extend` would change nothing."""
        return False

    # A table, from its beginning to its end

    @abstractmethod
    def new_table(self) -> Table: ...

    @abstractmethod
    def can_restore(self, n_tokens: int) -> bool:
        """Whether there is room for `restored_table`."""

    @abstractmethod
    def restored_table(self, n_tokens: int) -> Table:
        """A table with room for what a sequence of `n_tokens` needs to continue."""

    @abstractmethod
    def extend(
        self, table: Table, n_tokens: int, n_slots: int, n_new: int = 0, n_uncertain: int = 0
    ) -> list[BlockCopy]:
        """Make tokens n_tokens … n_slots - 1 writable; `n_new` run next, the last `n_uncertain` may be rejected."""

    @abstractmethod
    def commit(self, table: Table, n_tokens: int) -> None:
        """Records that the reserved slots are computed, up to `n_tokens`."""

    def note_begun(self, table: Table, n_tokens: int) -> None:
        """The reserved batch was launched, and runs even if its tokens, all after `n_tokens`, are rejected."""
        return

    @abstractmethod
    def drop_unseen(self, table: Table, position: int) -> None:
        """Give up what no query at `position` or later sees."""

    @abstractmethod
    def fork(self, table: Table, n_tokens: int) -> Table:
        """A second table that shares all that holds the first `n_tokens`."""

    @abstractmethod
    def can_truncate(self, table: Table, n_tokens: int) -> bool:
        """Whether the sequence can continue after `n_tokens` of its tokens."""

    @abstractmethod
    def truncate(self, table: Table, n_tokens: int) -> None:
        """Give up what only holds tokens from `n_tokens` on, and all reservations."""

    @abstractmethod
    def can_shift(self, table: Table, n_tokens: int, n_keep: int, n_drop: int) -> bool:
        """Whether `shift` is possible."""

    @abstractmethod
    def shift(self, table: Table, n_tokens: int, n_keep: int, n_drop: int) -> BlockShift:
        """Drop the `n_drop` tokens after the first `n_keep`; the tokens after them move to earlier positions."""

    # Prefixes

    @property
    @abstractmethod
    def source(self) -> PrefixSource:
        """The source that a prefix search reads."""

    @abstractmethod
    def adopt(self, past: Timeline, n_tokens: int) -> Table:
        """A table that shares what is cached of `n_tokens`, except for the unfinished last block (`adopt_tail`)."""

    @property
    @abstractmethod
    def can_adopt_tail(self) -> bool:
        """Whether there is room for a copy of an unfinished block."""

    @abstractmethod
    def adopt_tail(self, table: Table, past: Timeline, n_tokens: int) -> list[BlockCopy]:
        """Append a copy of the unfinished last block of `n_tokens`. The caller has checked the pool."""

    @abstractmethod
    def expect(self, table: Table, positions: Iterable[int], n_tokens: int) -> None:
        """Make it possible to continue after so many tokens, for each of `positions`, if that needs a checkpoint.

        `n_tokens`: those of the prompt.
        """

    @abstractmethod
    def n_before_checkpoint(self, table: Table, n_tokens: int, n_new: int) -> int:
        """How many of the next `n_new` tokens may run at once, so that an expected checkpoint can be made."""

    @abstractmethod
    def publish_block(self, table: Table, past: Timeline, index: int) -> None:
        """Let other sequences find the full block `index`, which has a key."""

    @abstractmethod
    def publish_end(self, table: Table, past: Timeline, *, n_before: int | None) -> None:
        """Let other sequences find an unfinished block, or a state.

        `n_before`: the tokens before those that have just been committed; None: the sequence ends.
        """

    @abstractmethod
    def clear_cached(self) -> None:
        """Unpublish and empty all that is kept only to be found again."""

    @abstractmethod
    def unpublish(self, parent: bytes, tokens: Sequence[int]) -> None:
        """Unpublish what comes after the block `parent` and has no other tokens than these; empty what is unused."""

    # Views

    @abstractmethod
    def stats(self, tables: Sequence[tuple[Table, int]]) -> GroupStats:
        """Counts over all live (table, n_tokens)."""

    @abstractmethod
    def check_integrity(self, tables: Sequence[tuple[Table, int]]) -> None:
        """Recount from all live (table, n_tokens). Raises AssertionError."""

    @abstractmethod
    def check_published(self, tables: Sequence[tuple[Table, Timeline]], hasher: BlockHasher) -> None:
        """Compare what is published with what the sequences hold. Raises AssertionError."""

    @abstractmethod
    def check_slots(self, table: Table, n_slots: int) -> None:
        """Compare the table with the number of positions that have a slot. Raises AssertionError."""
