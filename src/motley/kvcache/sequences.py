"""Block tables: which block holds which tokens of a sequence, and how tables grow, fork, shrink and share.

A *group* is all layers with full attention, or all layers with the same window. Each
group has its own pool, index and tables over the same timeline of tokens. A table lists the blocks in the
order of positions; token t is in entry t // block_size. In a windowed group the leading entries may be holes.

Shared blocks are never written: a sequence that writes into a shared last block gets a copy of it first. Copies
are not made here but returned as `BlockCopy`, for the arenas to carry out.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from motley.errors import ConfigError
from motley.kvcache.blocks import HOLE, BlockPool, first_visible_block, n_blocks_for, slots_of
from motley.kvcache.groups import ANY_NUMBER, BlockCopy, BlockShift, CacheGroup, GroupStats
from motley.kvcache.prefix import BlockHasher, PrefixIndex, Timeline

__all__ = ["BlockCopy", "BlockGroup", "BlockShift", "BlockTable", "GroupSpec", "GroupStats"]


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The layers that share block tables: the size of their pool and their window in tokens, if any."""

    name: str
    n_blocks: int
    window: int | None = None

    def __post_init__(self) -> None:
        if self.n_blocks < 1:
            raise ConfigError(
                f"KV cache group {self.name!r} has {self.n_blocks} blocks, but needs at least one",
                hint="raise the KV cache's limit or choose smaller blocks",
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(
                f"KV cache group {self.name!r} has a window of {self.window} tokens, not at least one"
            )


@dataclass(slots=True)
class BlockTable:
    """One sequence's blocks in one group. Only `BlockGroup` changes it."""

    # An int32 array rather than a list, so that numpy and torch copy it at memory speed.
    blocks: array[int] = field(default_factory=lambda: array("i"))
    n_holes: int = 0  # leading entries that are HOLE
    version: int = 0  # changes with every change other than growth
    first_valid: int = (
        0  # slots of earlier tokens hold nothing: no window saw them when a shift moved the others
    )


class BlockGroup(CacheGroup[BlockTable]):
    """The pool, the prefix index and the rules for tables of one group."""

    def __init__(self, number: int, spec: GroupSpec, block_size: int) -> None:
        self.number = number
        self.spec = spec
        self.name = spec.name
        self.unit = f"blocks of {block_size} tokens"
        self.block_size = block_size
        self.pool = BlockPool(spec.n_blocks)
        self.index = PrefixIndex(block_size, spec.window)

    @property
    def source(self) -> PrefixIndex:
        return self.index

    @property
    def max_uncertain(self) -> int:
        return ANY_NUMBER

    @property
    def n_free_tokens(self) -> int:
        return self.pool.n_available * self.block_size

    def n_needed(self, n_tokens: int, n_batch: int) -> int:
        """The most blocks that a sequence of `n_tokens`, fed in batches of up to `n_batch`, holds at once."""
        n_all = n_blocks_for(n_tokens, self.block_size)
        if self.spec.window is None:
            return n_all
        # The batch and what its first position sees before it, at the worst alignment.
        span = min(n_batch, n_tokens) + self.spec.window - 1
        return min(n_all, n_blocks_for(max(0, span - 1), self.block_size) + 1)

    def n_missing(self, table: BlockTable, n_tokens: int, n_slots: int) -> int:
        """How many blocks `extend` would allocate."""
        n_new = max(0, n_blocks_for(n_slots, self.block_size) - len(table.blocks))
        return n_new + self.must_copy_tail(table, n_tokens)

    def has_room(self, table: BlockTable, n_tokens: int, n_slots: int, n_uncertain: int = 0) -> bool:
        return self.n_missing(table, n_tokens, n_slots) <= self.pool.n_available

    def is_writable(self, table: BlockTable, n_tokens: int, n_slots: int) -> bool:
        if n_slots > len(table.blocks) * self.block_size:
            return False
        tail, n_kept = divmod(n_tokens, self.block_size)
        if not n_kept:
            return True
        block = table.blocks[tail]
        return self.pool.n_refs(block) == 1 and self.index.n_published(block) <= n_kept

    def must_copy(self, table: BlockTable, n_tokens: int) -> bool:
        return self.must_copy_tail(table, n_tokens)

    def must_copy_tail(self, table: BlockTable, n_tokens: int) -> bool:
        """Whether the block that token `n_tokens` goes to is unfinished and others have it, too."""
        tail, n_kept = divmod(n_tokens, self.block_size)
        return n_kept > 0 and self.pool.n_refs(table.blocks[tail]) > 1

    def extend(
        self, table: BlockTable, n_tokens: int, n_slots: int, n_new: int = 0, n_uncertain: int = 0
    ) -> list[BlockCopy]:
        """Make slots n_tokens … n_slots - 1 writable. The caller has checked `n_missing` against the pool."""
        copies = []
        tail, n_kept = divmod(n_tokens, self.block_size)
        if self.must_copy_tail(table, n_tokens):
            shared = table.blocks[tail]
            table.blocks[tail] = self._allocate()
            table.version += 1
            copies.append(BlockCopy(self.number, shared, table.blocks[tail], n_kept))
            self._release([shared])
        elif n_kept and self.index.n_published(table.blocks[tail]) > n_kept:
            self.index.unpublish(
                table.blocks[tail]
            )  # after a truncation: published slots are about to be written
        for _ in range(n_blocks_for(n_slots, self.block_size) - len(table.blocks)):
            table.blocks.append(self._allocate())
        return copies

    def commit(self, table: BlockTable, n_tokens: int) -> None:
        return

    def new_table(self) -> BlockTable:
        return BlockTable()

    def can_restore(self, n_tokens: int) -> bool:
        n_holes = first_visible_block(n_tokens - 1, self.spec.window, self.block_size)
        return n_blocks_for(n_tokens, self.block_size) - n_holes <= self.pool.n_available

    def restored_table(self, n_tokens: int) -> BlockTable:
        """A table of new blocks for what the last token and later ones see, behind holes."""
        n_holes = first_visible_block(n_tokens - 1, self.spec.window, self.block_size)
        blocks = [self._allocate() for _ in range(n_blocks_for(n_tokens, self.block_size) - n_holes)]
        return BlockTable(array("i", [HOLE] * n_holes + blocks), n_holes)

    def adopt(self, past: Timeline, n_tokens: int) -> BlockTable:
        """A new table that shares the full blocks of a prefix match."""
        table = BlockTable(array("i", self.index.visible_blocks(past.keys, n_tokens // self.block_size)))
        table.n_holes = table.blocks.count(HOLE)
        for block in table.blocks[table.n_holes :]:
            self.pool.share(block)
        return table

    @property
    def can_adopt_tail(self) -> bool:
        return self.pool.n_available > 0

    def adopt_tail(self, table: BlockTable, past: Timeline, n_tokens: int) -> list[BlockCopy]:
        parent, tokens = past.name_at(n_tokens)
        block, n_found = self.index.find_head(parent, tokens)
        assert n_found == len(tokens), "the search promised these tokens"
        copies = self.adopt_head(table, block, n_found)
        self.drop_unseen(table, n_tokens)
        return copies

    def adopt_head(self, table: BlockTable, block: int, n_tokens: int) -> list[BlockCopy]:
        """Append a copy of the first `n_tokens` slots of `block`. The caller has checked the pool."""
        self.pool.touch(block)
        copy = self._allocate()
        table.blocks.append(copy)
        # If nothing else could be evicted, the block itself was: its content is already in place.
        return [] if copy == block else [BlockCopy(self.number, block, copy, n_tokens)]

    def fork(self, table: BlockTable, n_tokens: int) -> BlockTable:
        """A second table that shares all blocks of the first `n_tokens`, the unfinished one included."""
        blocks = table.blocks[: n_blocks_for(n_tokens, self.block_size)]
        for block in blocks[table.n_holes :]:
            self.pool.share(block)
        return BlockTable(blocks, table.n_holes, first_valid=table.first_valid)

    def can_truncate(self, table: BlockTable, n_tokens: int) -> bool:
        """Whether all that position `n_tokens` sees is still there."""
        return n_tokens == 0 or self._first_seen(n_tokens) >= self.first_stored(table)

    def truncate(self, table: BlockTable, n_tokens: int) -> None:
        """Give up the blocks that only hold tokens from `n_tokens` on."""
        assert self.can_truncate(table, n_tokens), "the window of that position is gone"
        n_kept = n_blocks_for(n_tokens, self.block_size)
        if n_kept == len(table.blocks):
            return
        # The last block first: it is also the first to be evicted, and a prefix outlives its continuations.
        self._release(reversed(table.blocks[max(n_kept, table.n_holes) :]))
        del table.blocks[n_kept:]
        table.n_holes = min(table.n_holes, n_kept)
        table.first_valid = min(table.first_valid, n_tokens)
        table.version += 1

    def drop_unseen(self, table: BlockTable, position: int) -> None:
        """Make holes of the blocks that no query at `position` or later sees."""
        first = first_visible_block(position, self.spec.window, self.block_size)
        if first <= table.n_holes:
            return
        self._release(table.blocks[table.n_holes : first])
        for i in range(table.n_holes, first):
            table.blocks[i] = HOLE
        table.n_holes = first
        table.version += 1

    def can_shift(self, table: BlockTable, n_tokens: int, n_keep: int, n_drop: int) -> bool:
        """Whether `shift` finds all that the next position will see, and room for what it must not overwrite."""
        seen = self._first_seen(n_tokens - n_drop)
        if seen < min(n_keep, self.first_stored(table)):
            return False  # a window that would reach back to tokens which it has dropped
        n_fixed, owned = self._movable(table, n_tokens - n_drop, n_keep)
        n_missing = max(0, n_blocks_for(n_tokens - n_drop, self.block_size) - n_fixed - len(owned))
        must_copy = seen < n_keep and self.must_copy_tail(table, n_keep)
        return n_missing + must_copy <= self.pool.n_available

    def shift(self, table: BlockTable, n_tokens: int, n_keep: int, n_drop: int) -> BlockShift:
        """Drop the `n_drop` tokens after the first `n_keep`; the caller has asked `can_shift`.

        Blocks that are not shared are written again, in place; shared ones are left to the others.
        """
        size, n_left = self.block_size, n_tokens - n_drop
        old = BlockTable(table.blocks[:], table.n_holes, first_valid=table.first_valid)
        n_fixed, owned = self._movable(table, n_left, n_keep)
        n_holes = self._first_seen(n_left) // size
        copies = []
        if n_fixed > n_holes and n_keep < n_fixed * size:  # the last kept block continues with what moves up
            copies = self.extend(table, n_keep, n_keep)
            self.index.unpublish(table.blocks[n_fixed - 1])
        n_moved = n_blocks_for(n_left, size) - n_fixed
        reused = owned[:n_moved]
        for block in reused:
            self.index.unpublish(block)
        new = [self._allocate() for _ in range(n_moved - len(reused))]
        fixed = table.blocks[n_holes:n_fixed]
        kept = {*fixed, *reused, *(copy.src for copy in copies)}  # `extend` has released a copied one
        self._release(block for block in old.blocks[old.n_holes :] if block not in kept)
        table.blocks = array("i", [HOLE] * n_holes) + fixed + array("i", reused + new)
        table.n_holes = n_holes
        table.version += 1
        start = max(n_keep, n_holes * size, self.first_stored(old) - n_drop)
        if n_fixed == n_holes:
            table.first_valid = start
        sources = slots_of(old.blocks, start + n_drop, n_tokens, size)
        return BlockShift(self.number, copies, sources, slots_of(table.blocks, start, n_left, size), n_drop)

    def first_stored(self, table: BlockTable) -> int:
        """The first token that is not in a hole."""
        return max(table.n_holes * self.block_size, table.first_valid)

    def expect(self, table: BlockTable, positions: Iterable[int], n_tokens: int) -> None:
        return  # a sequence can continue after any of its tokens

    def n_before_checkpoint(self, table: BlockTable, n_tokens: int, n_new: int) -> int:
        return n_new

    def publish_block(self, table: BlockTable, past: Timeline, index: int) -> None:
        if table.blocks[index] != HOLE:  # of a restored sequence
            self.index.publish(table.blocks[index], past.keys[index], past.block(index), past.keys[index + 1])

    def publish_end(self, table: BlockTable, past: Timeline, *, n_before: int | None) -> None:
        """Publish the unfinished block. While it grows, it stays published as it was at first, until it is full."""
        tail, n_in_tail = divmod(len(past.tokens), self.block_size)
        if not n_in_tail or past.n_nameable < len(past.tokens):
            return
        if n_before is not None and tail * self.block_size < n_before:
            return
        n_published = self.index.n_published(table.blocks[tail])
        if n_published == 0 or (n_published < n_in_tail and n_before is None):
            self.index.publish(table.blocks[tail], past.keys[tail], past.block(tail), None)

    def clear_cached(self) -> None:
        """Unpublish and empty all cached blocks. Blocks in use stay published."""
        for block in self.pool.cached_blocks():
            self.index.unpublish(block)
            self.pool.discard(block)

    def unpublish(self, parent: bytes, tokens: Sequence[int]) -> None:
        """Unpublish the blocks after `parent` that have no other tokens than these; empty those that are not in use."""
        while tokens:
            block, n_common = self.index.find_head(parent, tokens)
            entry = self.index.published(block)
            if entry is None or n_common < len(entry.tokens):
                return
            self.index.unpublish(block)
            if self.pool.is_cached(block):
                self.pool.discard(block)

    def stats(self, tables: Sequence[tuple[BlockTable, int]]) -> GroupStats:
        """Counts over all live (table, n_tokens)."""
        n_wasted = 0
        tails: dict[int, list[int]] = {}  # unfinished block: how many tokens each of its tables has there
        for table, n_tokens in tables:
            tail, n_in_tail = divmod(n_tokens, self.block_size)
            n_wasted += (len(table.blocks) - n_blocks_for(n_tokens, self.block_size)) * self.block_size
            if n_in_tail:
                tails.setdefault(table.blocks[tail], []).append(n_in_tail)
        for block, lengths in tails.items():
            # A table that was not listed has the block in its middle, so it is full.
            if len(lengths) == self.pool.n_refs(block):
                n_wasted += self.block_size - max(lengths)
        n_used, n_cached = self.pool.n_used, self.pool.n_cached
        n_slots = n_used * self.block_size
        name, n_blocks = self.spec.name, self.spec.n_blocks
        return GroupStats(name, n_blocks, n_used, n_cached, self.pool.n_shared, n_slots, n_wasted)

    def check_integrity(self, tables: Sequence[tuple[BlockTable, int]]) -> None:
        """Recount from all live (table, n_tokens). Raises AssertionError."""
        refs: Counter[int] = Counter()
        for table, n_tokens in tables:
            held = table.blocks[table.n_holes :]
            assert HOLE not in held, "a hole in the middle of a table"
            assert all(block == HOLE for block in table.blocks[: table.n_holes]), "holes are miscounted"
            assert table.n_holes <= first_visible_block(n_tokens, self.spec.window, self.block_size), (
                "a block inside the window was dropped"
            )
            assert len(set(held)) == len(held), "a block is twice in one table"
            refs.update(held)
        self.pool.check_integrity(refs)
        cached = set(self.pool.cached_blocks())
        findable = {block for block in range(self.spec.n_blocks) if block in self.index}
        assert cached == {block for block in findable if not refs[block]}, "cached and findable blocks differ"

    def check_slots(self, table: BlockTable, n_slots: int) -> None:
        assert len(table.blocks) == n_blocks_for(n_slots, self.block_size), "blocks and slots differ"

    def check_published(self, tables: Sequence[tuple[BlockTable, Timeline]], hasher: BlockHasher) -> None:
        self.index.check_integrity(hasher)
        size = self.block_size
        for table, past in tables:
            for i, block in enumerate(table.blocks[table.n_holes :], start=table.n_holes):
                entry = self.index.published(block)
                if entry is None:
                    continue
                assert i * size < past.n_nameable, (
                    "a block is published with tokens that are not its whole past"
                )
                mine = tuple(past.block(i))
                n_both = min(len(mine), len(entry.tokens))
                assert entry.parent == past.keys[i], "a block is published with another past"
                assert entry.tokens[:n_both] == mine[:n_both], "a block is published with other tokens"

    def _first_seen(self, position: int) -> int:
        """The first token that a query at `position` sees."""
        return 0 if self.spec.window is None else max(0, position - self.spec.window + 1)

    def _movable(self, table: BlockTable, n_left: int, n_keep: int) -> tuple[int, list[int]]:
        """For a shift that leaves `n_left` tokens: the entries that stay, and later blocks that are the table's own."""
        seen = self._first_seen(n_left)
        stays = seen < n_keep  # else the window is past the kept tokens, and all entries before it are holes
        n_fixed = n_blocks_for(n_keep, self.block_size) if stays else seen // self.block_size
        first = max(n_fixed, table.n_holes) if stays else table.n_holes
        return n_fixed, [block for block in table.blocks[first:] if self.pool.n_refs(block) == 1]

    def _allocate(self) -> int:
        block = self.pool.allocate()
        self.index.unpublish(block)
        return block

    def _release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.pool.release(block, keep=block in self.index)
