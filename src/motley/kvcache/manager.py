"""The manager: what the scheduler knows of the KV cache.

The life of a sequence:

    opened = cache.open(prompt)               # shares what is already cached: opened.n_cached tokens
    run arenas' copies of opened.copies
    for each batch of its next tokens:
        cache.advance(seq, n_tokens so far)   # windowed groups drop what this batch cannot see
        copies = cache.reserve(seq, len(batch))  # None: the pool is full, nothing has changed; wait or preempt
        run arenas' copies, then store K/V at the slots of the next tokens
        cache.commit(seq, batch)              # eligible for prefix reuse from now on
    cache.free(seq)                           # what can be found again stays until the room is needed

Rules for the caller:
- Copies are carried out in the order given, before anything else is stored, copied or given back.
- A reservation holds until the sequence's next `reserve` or `truncate`; slots may be written until then.
- Only tokens whose K/V have been stored are committed; `commit` may take fewer than were reserved
  (rejected drafts), and the left-over slots serve the next `reserve` or go with `truncate`.
- Only committed tokens are found: sequences that compute the same prompt at the same time do not share it.
  Open late, when the sequence is about to run.

All calls cost O(1) per block that they touch; only `stats` and `check_integrity` depend on the number of
sequences. (A partial prefix hit is a bisection among the blocks that follow the same past.)

Threads: one, the engine's. There are no locks. `stats()` runs there too; the result is frozen, and
`last_stats` (the result of its latest call) may be read from any thread.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from motley.errors import CacheError, ConfigError
from motley.kvcache.blocks import HOLE, first_visible_block, n_blocks_for, slots_of
from motley.kvcache.prefix import BlockHasher, PrefixStats, find_prefix
from motley.kvcache.results import CacheStats, Opened, Restored, TableView
from motley.kvcache.sequences import BlockCopy, BlockGroup, BlockShift, BlockTable, GroupSpec


@dataclass(slots=True)
class _Sequence:
    tokens: array[int]  # committed
    keys: list[bytes]  # the root, then the key of each full block
    tables: list[BlockTable]  # per group
    n_slots: int  # positions with a slot: at least len(tokens)
    n_own: int | None = None  # after a shift: K/V of later tokens owe something to tokens that are gone

    @property
    def n_nameable(self) -> int:
        """Tokens whose K/V depend only on the tokens before them: eligible for prefix reuse."""
        return len(self.tokens) if self.n_own is None else min(self.n_own, len(self.tokens))


class CacheManager:
    """Sequences over one or more groups of blocks. The first group is usually the one with full attention."""

    def __init__(
        self, groups: Iterable[GroupSpec], block_size: int, *, salt: bytes = b"", find_prefixes: bool = True
    ) -> None:
        """`salt` is whatever changes K/V for all sequences: model, cache types, rotation."""
        if block_size < 1 or block_size & (block_size - 1):
            raise ConfigError(
                f"a KV cache block of {block_size} tokens is not a power of two", hint="try 16, 32, 64"
            )
        self.block_size = block_size
        self.groups = tuple(BlockGroup(i, spec, block_size) for i, spec in enumerate(groups))
        if not self.groups:
            raise ConfigError("a KV cache needs at least one group of layers")
        self._finds_prefixes = find_prefixes
        self._hasher = BlockHasher(salt)
        self._sequences: dict[int, _Sequence] = {}
        self._next_seq = 0
        self._n_queries = self._n_query_tokens = self._n_hit_tokens = 0
        self.last_stats = self.stats()

    @property
    def finds_prefixes(self) -> bool:
        return self._finds_prefixes

    # What fits

    @property
    def n_free_tokens(self) -> int:
        """Slots of empty and evictable blocks, in the group that has the fewest."""
        return min(group.pool.n_available for group in self.groups) * self.block_size

    @property
    def n_evictable(self) -> int:
        """Blocks kept only because they may be found again, over all groups."""
        return sum(group.pool.n_cached for group in self.groups)

    def can_ever_fit(self, n_tokens: int, n_batch: int | None = None) -> bool:
        """Whether a sequence of `n_tokens` fits into an idle cache, fed in batches of up to `n_batch`."""
        return all(g.n_needed(n_tokens, n_batch or n_tokens) <= g.pool.n_blocks for g in self.groups)

    def longest_fit(self, most: int, n_batch: int) -> int:
        """The largest n <= most for which `can_ever_fit(n, n_batch)`."""
        return bisect_left(range(1, most + 1), True, key=lambda n: not self.can_ever_fit(n, n_batch))

    def require_fit(self, n_tokens: int, n_batch: int | None = None) -> None:
        """Refuse a sequence that can never fit, with the numbers."""
        for group in self.groups:
            n_needed, n_blocks = group.n_needed(n_tokens, n_batch or n_tokens), group.pool.n_blocks
            if n_needed > n_blocks:
                raise CacheError(
                    f"{n_tokens} tokens need {n_needed} blocks of {self.block_size} tokens in KV cache group "
                    f"{group.spec.name!r}, which has {n_blocks} ({n_blocks * self.block_size} tokens) in all",
                    hint="shorten the prompt or the answer, or raise --kv-cache-tokens / --kv-cache-bytes",
                )

    # The life of a sequence

    def open(
        self,
        tokens: Sequence[int] = (),
        *,
        salt: bytes = b"",
        keys: list[bytes] | None = None,
        find: bool = True,
    ) -> Opened:
        """Begin a sequence with as much of `tokens` as is cached, short of the last: its logits are wanted.

        `salt` is whatever changes K/V for this sequence alone. Never refuses, and reserves nothing. `keys` is the
        caller's list of these tokens' block hashes, empty at first: what it has is not hashed again. `find=False`:
        begin with nothing.
        """
        root = self._hasher.root(salt)
        sequence = _Sequence(array("I"), [root], [BlockTable() for _ in self.groups], 0)
        copies: list[BlockCopy] = []
        try:
            if self._finds_prefixes and find and tokens:
                copies = self._share_prefix(sequence, array("I", tokens), [] if keys is None else keys)
        except BaseException:
            for group, table in zip(self.groups, sequence.tables, strict=True):
                group.truncate(table, 0)
            raise
        self._count_query(len(tokens), len(sequence.tokens), 1)
        return Opened(self._add(sequence), len(sequence.tokens), len(tokens), copies)

    def reject(self, opened: Opened) -> None:
        """Undo `open`, whose copies have not been made: it does not count as a query either."""
        self._count_query(opened.n_wanted, opened.n_cached, -1)
        self.free(opened.seq, copies_done=False)

    def restore(self, tokens: Sequence[int], *, salt: bytes = b"") -> Restored | None:
        """Begin a sequence whose K/V come from elsewhere; None if there is no room. To be filled and committed at once.

        `salt`: as for `open`. Windowed groups have slots for what the last token and later ones see, and holes before
        that.
        """
        first_blocks = [
            first_visible_block(len(tokens) - 1, group.spec.window, self.block_size) for group in self.groups
        ]
        counts = [n_blocks_for(len(tokens), self.block_size) - first for first in first_blocks]
        if any(n > group.pool.n_available for n, group in zip(counts, self.groups, strict=True)):
            return None
        tables = [
            g.make_table(first, n) for g, first, n in zip(self.groups, first_blocks, counts, strict=True)
        ]
        seq = self._add(_Sequence(array("I"), [self._hasher.root(salt)], tables, len(tokens)))
        stored = [self.stored_slots(seq, i) for i in range(len(tables))]
        return Restored(seq, tuple(first for first, _ in stored), tuple(slots for _, slots in stored))

    def reserve(self, seq: int, n_new: int, *, may_copy: bool = True) -> list[BlockCopy] | None:
        """Make slots for the next `n_new` tokens. Gives what has to be copied before they are written; None, and no
        change at all, if a group has no room for them, or if it `may_copy` nothing and would have to.
        """
        assert n_new >= 1, n_new
        sequence = self._sequences[seq]
        n_tokens = len(sequence.tokens)
        n_slots = max(sequence.n_slots, n_tokens + n_new)
        pairs = list(zip(self.groups, sequence.tables, strict=True))
        if any(group.n_missing(table, n_tokens, n_slots) > group.pool.n_available for group, table in pairs):
            return None
        if not may_copy and any(group.must_copy_tail(table, n_tokens) for group, table in pairs):
            return None
        sequence.n_slots = n_slots
        return [copy for group, table in pairs for copy in group.extend(table, n_tokens, n_slots)]

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """Record the next tokens, whose K/V now stand in reserved slots, and let others find them."""
        sequence = self._sequences[seq]
        n_before = len(sequence.tokens)
        assert n_before + len(tokens) <= sequence.n_slots, "commit of tokens that were not reserved"
        sequence.tokens.extend(tokens)
        if self._finds_prefixes and tokens:
            self._name_full_blocks(sequence)
            if len(sequence.tokens) // self.block_size * self.block_size >= n_before:
                # A growing block keeps its first name until it is full.
                self._publish_tail(sequence, only_unpublished=True)

    def advance(self, seq: int, min_position: int) -> None:
        """Drop blocks behind the windows of `min_position`, the smallest one of the sequence's next batch.

        After this the sequence cannot be truncated below `min_position`, except to nothing.
        """
        sequence = self._sequences[seq]
        assert min_position <= len(sequence.tokens), "tokens before the batch are not committed yet"
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.drop_unseen(table, min_position)

    def fork(self, seq: int) -> int:
        """A second sequence with the same tokens and blocks; the first to write the last block copies it."""
        parent = self._sequences[seq]
        n_tokens = len(parent.tokens)
        tables = [g.fork(table, n_tokens) for g, table in zip(self.groups, parent.tables, strict=True)]
        return self._add(_Sequence(parent.tokens[:], parent.keys[:], tables, n_tokens, parent.n_own))

    def can_truncate(self, seq: int, n_tokens: int) -> bool:
        """Whether windowed groups still have what position `n_tokens` sees."""
        tables = self._sequences[seq].tables
        return all(g.can_truncate(table, n_tokens) for g, table in zip(self.groups, tables, strict=True))

    def truncate(self, seq: int, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens, and no reservation."""
        sequence = self._sequences[seq]
        assert 0 <= n_tokens <= len(sequence.tokens), (n_tokens, len(sequence.tokens))
        if not self.can_truncate(seq, n_tokens):
            raise CacheError(
                f"a sequence of {len(sequence.tokens)} tokens cannot go back to {n_tokens}: "
                "sliding-window layers have dropped what that position sees",
                hint="free it and open it again with the tokens to keep",
            )
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.truncate(table, n_tokens)
        del sequence.tokens[n_tokens:]
        del sequence.keys[1 + n_tokens // self.block_size :]
        sequence.n_slots = n_tokens

    def shift(self, seq: int, n_keep: int, n_drop: int) -> list[BlockShift] | None:
        """Forget the `n_drop` tokens after the first `n_keep`; those behind them move up to earlier positions.

        None, and no change at all, if a window would see tokens that it has dropped, or if shared blocks would have to
        be copied and there is no room. The shifts are carried out at once, before anything else. Reservations end, and
        the sequence cannot be truncated below what is left, except to what was kept.
        """
        sequence = self._sequences[seq]
        n_tokens = len(sequence.tokens)
        assert n_keep >= 0, n_keep
        assert 1 <= n_drop <= n_tokens - n_keep, (n_tokens, n_keep, n_drop)
        pairs = list(zip(self.groups, sequence.tables, strict=True))
        if not all(group.can_shift(table, n_tokens, n_keep, n_drop) for group, table in pairs):
            return None
        shifts = [group.shift(table, n_tokens, n_keep, n_drop) for group, table in pairs]
        sequence.n_own = min(sequence.n_nameable, n_keep)
        del sequence.tokens[n_keep : n_keep + n_drop]
        del sequence.keys[1 + sequence.n_own // self.block_size :]
        sequence.n_slots = n_tokens - n_drop
        return shifts

    def free(self, seq: int, *, copies_done: bool = True) -> None:
        """End a sequence. Its blocks stay findable until their room is needed.

        `copies_done=False`: copies that were returned for it may not have been made, so its last block is not kept.
        """
        if self._finds_prefixes and copies_done:
            self._publish_tail(self._sequences[seq], only_unpublished=False)
        self.truncate(seq, 0)
        del self._sequences[seq]

    # Views

    def n_tokens(self, seq: int) -> int:
        """Committed tokens."""
        return len(self._sequences[seq].tokens)

    def tables(self, seqs: Iterable[int], group: int = 0) -> list[TableView]:
        """The block tables of a batch in one group. Copies nothing."""
        rows = [self._sequences[seq] for seq in seqs]
        tables = [(row.tables[group], len(row.tokens)) for row in rows]
        return [TableView(table.blocks, table.n_holes, n_tokens, table.version) for table, n_tokens in tables]

    def stored_slots(self, seq: int, group: int) -> tuple[int, list[int]]:
        """The first token that a group has of a sequence, and the slots of all from there to the last one's."""
        sequence = self._sequences[seq]
        table = sequence.tables[group]
        first = self.groups[group].first_stored(table)
        return first, slots_of(table.blocks, first, sequence.n_slots, self.block_size)

    def take_emptied(self) -> list[list[int]]:
        """Per group: blocks that became empty since the last call and still are. Arenas may unmap them."""
        return [group.pool.take_emptied() for group in self.groups]

    def invalidate(self) -> None:
        """The contents of all blocks are lost: later sequences find none of them, not even those still in use."""
        self._hasher.renew()
        self.clear_prefixes()

    def clear_prefixes(self) -> None:
        """Empty all blocks that are kept only to be found again."""
        for group in self.groups:
            group.clear_cached()

    def forget(self, tokens: Sequence[int], *, salt: bytes = b"") -> None:
        """Unpublish the blocks of these tokens, and empty those that no sequence uses. `salt`: as for `open`."""
        whole = array("I", tokens)
        parents = [self._hasher.root(salt)]
        for start in range(0, len(whole) // self.block_size * self.block_size, self.block_size):
            parents.append(self._hasher.key(parents[-1], whole[start : start + self.block_size]))
        for group in self.groups:
            for i, parent in enumerate(parents):
                group.forget(parent, whole[i * self.block_size : (i + 1) * self.block_size])

    def stats(self) -> CacheStats:
        """A frozen snapshot, in O(sequences). Engine thread only; other threads read `last_stats`."""
        rows = self._sequences.values()
        groups = tuple(
            g.stats([(row.tables[i], len(row.tokens)) for row in rows]) for i, g in enumerate(self.groups)
        )
        n_evictions = sum(group.pool.n_evictions for group in self.groups)
        prefix = PrefixStats(self._n_queries, self._n_query_tokens, self._n_hit_tokens, n_evictions)
        n_tokens = sum(len(row.tokens) for row in rows)
        self.last_stats = CacheStats(self.block_size, len(rows), n_tokens, groups, prefix)
        return self.last_stats

    def check_integrity(self) -> None:
        """Recount everything from the sequences up. Raises AssertionError: the mistake is ours."""
        for i, group in enumerate(self.groups):
            group.check_integrity([(row.tables[i], len(row.tokens)) for row in self._sequences.values()])
            group.index.check_integrity(self._hasher)
        for sequence in self._sequences.values():
            self._check_sequence(sequence)

    # Inside

    def _add(self, sequence: _Sequence) -> int:
        seq = self._next_seq
        self._next_seq += 1
        self._sequences[seq] = sequence
        return seq

    def _share_prefix(self, sequence: _Sequence, tokens: array[int], known: list[bytes]) -> list[BlockCopy]:
        indexes = [group.index for group in self.groups]
        match = find_prefix(
            indexes, self._hasher, sequence.keys[0], tokens, limit=len(tokens) - 1, known=known
        )
        sequence.keys = match.keys
        for i, (group, blocks) in enumerate(zip(self.groups, match.blocks, strict=True)):
            sequence.tables[i] = group.adopt(blocks)
        n_cached = (len(match.keys) - 1) * self.block_size
        copies: list[BlockCopy] = []
        if match.n_tail and all(group.pool.n_available for group in self.groups):
            for group, table, block in zip(self.groups, sequence.tables, match.tails, strict=True):
                copies += group.adopt_head(table, block, match.n_tail)
                group.drop_unseen(table, n_cached + match.n_tail)
            n_cached += match.n_tail
        sequence.tokens = tokens[:n_cached]
        sequence.n_slots = n_cached
        return copies

    def _count_query(self, n_tokens: int, n_hit: int, by: int) -> None:
        if self._finds_prefixes and n_tokens:
            self._n_queries += by
            self._n_query_tokens += by * n_tokens
            self._n_hit_tokens += by * n_hit

    def _name_full_blocks(self, sequence: _Sequence) -> None:
        size = self.block_size
        for i in range(len(sequence.keys) - 1, sequence.n_nameable // size):
            parent, tokens = sequence.keys[i], sequence.tokens[i * size : (i + 1) * size]
            key = self._hasher.key(parent, tokens)
            sequence.keys.append(key)
            for group, table in zip(self.groups, sequence.tables, strict=True):
                if table.blocks[i] != HOLE:  # of a restored sequence
                    group.index.publish(table.blocks[i], parent, tokens, key)

    def _publish_tail(self, sequence: _Sequence, *, only_unpublished: bool) -> None:
        tail, n_in_tail = divmod(len(sequence.tokens), self.block_size)
        if not n_in_tail or sequence.n_nameable < len(sequence.tokens):
            return
        for group, table in zip(self.groups, sequence.tables, strict=True):
            n_published = group.index.n_published(table.blocks[tail])
            if n_published == 0 or (n_published < n_in_tail and not only_unpublished):
                tokens = sequence.tokens[tail * self.block_size :]
                group.index.publish(table.blocks[tail], sequence.keys[tail], tokens, None)

    def _check_sequence(self, sequence: _Sequence) -> None:
        size, n_tokens = self.block_size, len(sequence.tokens)
        assert sequence.n_slots >= n_tokens, "tokens without slots"
        n_full = sequence.n_nameable // size if self._finds_prefixes else 0
        assert len(sequence.keys) == 1 + n_full, "a full block without a key, or a key without a full block"
        for i, key in enumerate(sequence.keys[1:]):
            tokens = sequence.tokens[i * size : (i + 1) * size]
            assert key == self._hasher.key(sequence.keys[i], tokens), "the sequence's hash chain is broken"
        for group, table in zip(self.groups, sequence.tables, strict=True):
            assert len(table.blocks) == n_blocks_for(sequence.n_slots, size), "blocks and slots differ"
            for i, block in enumerate(table.blocks[table.n_holes :], start=table.n_holes):
                entry = group.index.published(block)
                if entry is None:
                    continue
                assert i * size < sequence.n_nameable, (
                    "a block is published with tokens that are not its whole past"
                )
                mine = tuple(sequence.tokens[i * size : (i + 1) * size])
                n_both = min(len(mine), len(entry.tokens))
                assert entry.parent == sequence.keys[i], "a block is published with another past"
                assert entry.tokens[:n_both] == mine[:n_both], "a block is published with other tokens"
