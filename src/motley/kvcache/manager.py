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
from dataclasses import dataclass, replace
from typing import Any

from motley.errors import CacheError, ConfigError
from motley.kvcache.blocks import slots_of
from motley.kvcache.groups import ANY_NUMBER, BlockCopy, BlockShift
from motley.kvcache.leases import Lease, LeasedTable
from motley.kvcache.prefix import BlockHasher, PrefixStats, Timeline, find_prefix, longest_usable
from motley.kvcache.results import CacheStats, Opened, Restored, TableView
from motley.kvcache.sequences import BlockGroup, GroupSpec
from motley.kvcache.states import StateGroup, StateSpec, StateTable


@dataclass(slots=True)
class _Sequence:
    past: Timeline  # committed tokens
    tables: list[Any]  # per group
    n_slots: int  # positions with a slot: at least as many as there are tokens

    @property
    def tokens(self) -> array[int]:
        return self.past.tokens

    @property
    def n_tokens(self) -> int:
        return len(self.past.tokens)


class CacheManager:
    """Sequences over one or more groups of blocks. The first group is usually the one with full attention."""

    def __init__(
        self,
        groups: Iterable[GroupSpec | StateSpec],
        block_size: int,
        *,
        salt: bytes = b"",
        find_prefixes: bool = True,
    ) -> None:
        """`salt` is whatever changes K/V for all sequences: model, cache types, rotation."""
        if block_size < 1 or block_size & (block_size - 1):
            raise ConfigError(
                f"a KV cache block of {block_size} tokens is not a power of two", hint="try 16, 32, 64"
            )
        self.block_size = block_size
        self.groups = tuple(_make_group(i, spec, block_size) for i, spec in enumerate(groups))
        if not self.groups:
            raise ConfigError("a KV cache needs at least one group of layers")
        self._finds_prefixes = find_prefixes
        # Most calls are for the next token of an answer, so they skip what changes nothing then.
        self._dropping = [i for i, g in enumerate(self.groups) if isinstance(g, BlockGroup) and g.spec.window]
        self._has_states = any(isinstance(group, StateGroup) for group in self.groups)
        self._hasher = BlockHasher(salt)
        self._sequences: dict[int, _Sequence] = {}
        self._next_seq = 0
        self.n_changes = (
            0  # of any block table, and of who shares blocks: leases hold while it stays the same
        )
        self._n_queries = self._n_query_tokens = self._n_hit_tokens = 0
        self.last_stats = self.stats()

    @property
    def finds_prefixes(self) -> bool:
        return self._finds_prefixes

    # What fits

    @property
    def n_free_tokens(self) -> int:
        """Slots of empty and evictable blocks, in the group that has the fewest."""
        return min(group.n_free_tokens for group in self.groups)

    @property
    def n_evictable(self) -> int:
        """Blocks kept only because they may be found again, over all groups."""
        return sum(group.pool.n_cached for group in self.groups)

    @property
    def max_uncertain(self) -> int:
        """The most tokens of a `reserve` that may be uncertain."""
        return min(group.max_uncertain for group in self.groups)

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
                    f"{n_tokens} tokens need {n_needed} {group.unit} in KV cache group "
                    f"{group.name!r}, which has {n_blocks} ({n_blocks * self.block_size} tokens) in all",
                    hint="shorten the prompt or the answer, or raise --kv-cache-tokens / --kv-cache-bytes",
                )

    # A sequence, from its beginning to its end

    def open(
        self,
        tokens: Sequence[int] = (),
        *,
        salt: bytes = b"",
        keys: list[bytes] | None = None,
        find: bool = True,
        checkpoints: Sequence[int] | None = (),
    ) -> Opened:
        """Begin a sequence with as much of `tokens` as is cached, short of the last: its logits are wanted.

        `salt` is whatever changes K/V for this sequence alone. Never refuses, and reserves nothing. `keys` is the
        caller's list of these tokens' block hashes, empty at first: what it has is not hashed again. `find=False`:
        begin with nothing. `checkpoints`: lengths after which later prompts may part from this one; only layers with a
        state need them. Default: the last block boundary. None: nothing is expected to follow.
        """
        sequence = self._new_sequence(salt)
        copies: list[BlockCopy] = []
        try:
            if self._finds_prefixes and find and tokens:
                copies = self._share_prefix(
                    sequence, array("I", tokens), [] if keys is None else keys, checkpoints
                )
        except BaseException:
            for group, table in zip(self.groups, sequence.tables, strict=True):
                group.truncate(table, 0)
            raise
        self._count_query(len(tokens), sequence.n_tokens, 1)
        return Opened(self._add(sequence), sequence.n_tokens, len(tokens), copies)

    def reject(self, opened: Opened) -> None:
        """Undo `open`, whose copies have not been made: it does not count as a query either."""
        self._count_query(opened.n_wanted, opened.n_cached, -1)
        self.free(opened.seq, copies_done=False)

    def restore(self, tokens: Sequence[int], *, salt: bytes = b"") -> Restored | None:
        """Begin a sequence whose K/V come from elsewhere; None if there is no room. To be filled and committed at once.

        `salt`: as for `open`. Windowed groups have slots for what the last token and later ones see, and holes before
        that.
        """
        if not all(group.can_restore(len(tokens)) for group in self.groups):
            return None
        sequence = self._new_sequence(salt)
        sequence.tables = [group.restored_table(len(tokens)) for group in self.groups]
        sequence.n_slots = len(tokens)
        seq = self._add(sequence)
        stored = [self.stored_slots(seq, i) for i in range(len(self.groups))]
        return Restored(seq, tuple(first for first, _ in stored), tuple(slots for _, slots in stored))

    def n_before_checkpoint(self, seq: int, n_new: int) -> int:
        """How many of the next `n_new` tokens may run in one batch, so that expected checkpoints can be made."""
        sequence = self._sequences[seq]
        pairs = zip(self.groups, sequence.tables, strict=True)
        return min(group.n_before_checkpoint(table, sequence.n_tokens, n_new) for group, table in pairs)

    def reserve(
        self, seq: int, n_new: int, *, n_uncertain: int = 0, may_copy: bool = True
    ) -> list[BlockCopy] | None:
        """Make slots for the next `n_new` tokens. Gives what has to be copied before they are written; None, and no
        change at all, if a group has no room for them, or if it `may_copy` nothing and would have to.

        The last `n_uncertain` of them may be left out of the `commit`, or truncated before the next `reserve`.
        """
        assert n_new >= 1, n_new
        assert 0 <= n_uncertain <= n_new, (n_new, n_uncertain)
        sequence = self._sequences[seq]
        n_tokens = sequence.n_tokens
        n_slots = max(sequence.n_slots, n_tokens + n_new)
        pairs = list(zip(self.groups, sequence.tables, strict=True))
        if all(group.is_writable(table, n_tokens, n_slots) for group, table in pairs):
            sequence.n_slots = n_slots
            return []
        if not all(group.has_room(table, n_tokens, n_slots, n_uncertain) for group, table in pairs):
            return None
        if not may_copy and any(group.must_copy(table, n_tokens) for group, table in pairs):
            return None
        sequence.n_slots = n_slots
        self.n_changes += 1
        return [
            copy
            for group, table in pairs
            for copy in group.extend(table, n_tokens, n_slots, n_new, n_uncertain)
        ]

    def note_begun(self, seq: int) -> None:
        """Record that the reserved batch, whose tokens are all uncertain, was launched: it will run, whatever becomes
        of them. Earlier tokens that it adds to states are in the states from now on.
        """
        sequence = self._sequences[seq]
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.note_begun(table, sequence.n_tokens)

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """Record the next tokens, whose K/V are now in reserved slots, and publish the blocks that they fill."""
        sequence = self._sequences[seq]
        n_before = sequence.n_tokens
        assert n_before + len(tokens) <= sequence.n_slots, "commit of tokens that were not reserved"
        sequence.past.tokens.extend(tokens)
        n_inside, size = n_before % self.block_size, self.block_size
        if n_inside and n_inside + len(tokens) < size and not self._has_states:
            return  # in the middle of a block: there is nothing new to publish
        self.publish(sequence, n_before)

    def advance(self, seq: int, min_position: int) -> None:
        """Drop blocks behind the windows of `min_position`, the smallest one of the sequence's next batch.

        After this the sequence cannot be truncated below `min_position`, except to nothing.
        """
        sequence = self._sequences[seq]
        assert min_position <= sequence.n_tokens, "tokens before the batch are not committed yet"
        for i in self._dropping:
            table = sequence.tables[i]
            n_holes = table.n_holes
            self.groups[i].drop_unseen(table, min_position)
            self.n_changes += table.n_holes != n_holes

    def lease(self, seqs: Sequence[int], counts: Sequence[int] | None = None) -> Lease | None:
        """The right to append tokens to these sequences: no `advance`, `reserve` and `commit` for each.

        It ends when `n_changes` changes, and for each sequence at one of the lease's `ends`. None: one of them has no
        room for its next tokens, or would have to copy a block; or layers have states, which every token changes.
        `counts`: of the next tokens; default: one of each.
        """
        if self._has_states:
            return None
        for i, seq in enumerate(seqs):
            n_new = 1 if counts is None else counts[i]
            self.advance(seq, self._sequences[seq].n_tokens)
            if self.reserve(seq, n_new, n_uncertain=n_new - 1, may_copy=False) is None:
                return None
        rows = [self._sequences[seq] for seq in seqs]
        size, ends = self.block_size, [ANY_NUMBER] * len(rows)
        n_slots = ends[:]
        tables: list[list[LeasedTable]] = []
        for number, group in enumerate(self.groups):
            assert isinstance(group, BlockGroup)
            window, leased = group.spec.window, []
            for i, row in enumerate(rows):
                table = row.tables[number]
                n_slots[i] = min(n_slots[i], len(table.blocks) * size)
                ends[i] = min(ends[i], n_slots[i])
                if window is not None:  # from there on it drops a block
                    ends[i] = min(ends[i], (table.n_holes + 1) * size + window - 1)
                leased.append(LeasedTable(table.n_holes * size, table.blocks[table.n_holes :]))
            tables.append(leased)
        return Lease(self, rows, ends, n_slots, tables)

    def fork(self, seq: int) -> int:
        """A second sequence with the same tokens and blocks; the first to write the last block copies it."""
        parent = self._sequences[seq]
        self.n_changes += 1
        n_tokens, past = parent.n_tokens, parent.past
        tables = [g.fork(table, n_tokens) for g, table in zip(self.groups, parent.tables, strict=True)]
        copied = replace(past, tokens=past.tokens[:], keys=past.keys[:])
        return self._add(_Sequence(copied, tables, n_tokens))

    def can_truncate(self, seq: int, n_tokens: int) -> bool:
        """Whether windowed groups still have what position `n_tokens` sees, and states can go back there."""
        tables = self._sequences[seq].tables
        return all(g.can_truncate(table, n_tokens) for g, table in zip(self.groups, tables, strict=True))

    def truncate(self, seq: int, n_tokens: int) -> None:
        """Keep the first `n_tokens` tokens, and no reservation."""
        sequence = self._sequences[seq]
        assert 0 <= n_tokens <= sequence.n_tokens, (n_tokens, sequence.n_tokens)
        if not self.can_truncate(seq, n_tokens):
            raise CacheError(
                f"a sequence of {sequence.n_tokens} tokens cannot go back to {n_tokens}: sliding-window layers have "
                "dropped what that position sees, or recurrent states include later tokens",
                hint="free it and open it again with the tokens to keep",
            )
        self.n_changes += 1
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.truncate(table, n_tokens)
        del sequence.past.tokens[n_tokens:]
        del sequence.past.keys[1 + n_tokens // self.block_size :]
        sequence.n_slots = n_tokens

    def shift(self, seq: int, n_keep: int, n_drop: int) -> list[BlockShift] | None:
        """Forget the `n_drop` tokens after the first `n_keep`; those behind them move up to earlier positions.

        None, and no change at all, if a window would see tokens that it has dropped, or if shared blocks would have to
        be copied and there is no room. The shifts are carried out at once, before anything else. Reservations end, and
        the sequence cannot be truncated below what is left, except to what was kept.
        """
        sequence = self._sequences[seq]
        n_tokens, past = sequence.n_tokens, sequence.past
        assert n_keep >= 0, n_keep
        assert 1 <= n_drop <= n_tokens - n_keep, (n_tokens, n_keep, n_drop)
        pairs = list(zip(self.groups, sequence.tables, strict=True))
        if not all(group.can_shift(table, n_tokens, n_keep, n_drop) for group, table in pairs):
            return None
        self.n_changes += 1
        shifts = [group.shift(table, n_tokens, n_keep, n_drop) for group, table in pairs]
        past.n_own = min(past.n_nameable, n_keep)
        del past.tokens[n_keep : n_keep + n_drop]
        del past.keys[1 + past.n_own // self.block_size :]
        sequence.n_slots = n_tokens - n_drop
        return shifts

    def move(self, seq: int, sources: Sequence[int], targets: Sequence[int]) -> list[BlockShift]:
        """Moves of K/V between reserved slots, by their places in the sequence, none of them committed. For rows of a
        tree that are the sequence's next tokens. The caller carries the moves out before it commits these tokens.
        """
        sequence = self._sequences[seq]
        assert all(sequence.n_tokens <= place < sequence.n_slots for place in (*sources, *targets))
        size = self.block_size
        return [
            BlockShift(
                number,
                [],
                [table.blocks[place // size] * size + place % size for place in sources],
                [table.blocks[place // size] * size + place % size for place in targets],
                distance=0,
            )
            for number, table in enumerate(sequence.tables)
        ]

    def free(self, seq: int, *, copies_done: bool = True) -> None:
        """End a sequence. Its blocks and its state stay findable until their room is needed.

        `copies_done=False`: copies that were returned for it may not have been made, or a reserved batch may have run
        that was not committed: its last block and its state are not kept.
        """
        if self._finds_prefixes and copies_done:
            sequence = self._sequences[seq]
            for group, table in zip(self.groups, sequence.tables, strict=True):
                group.publish_end(table, sequence.past, n_before=None)
        self.truncate(seq, 0)
        del self._sequences[seq]

    # Views

    def n_tokens(self, seq: int) -> int:
        """Committed tokens."""
        return self._sequences[seq].n_tokens

    def tables(self, seqs: Iterable[int], group: int = 0) -> list[TableView]:
        """The block tables of a batch in one group. Copies nothing."""
        rows = [self._sequences[seq] for seq in seqs]
        tables = [(row.tables[group], row.n_tokens) for row in rows]
        return [TableView(table.blocks, table.n_holes, n_tokens, table.version) for table, n_tokens in tables]

    def states(self, seqs: Iterable[int], group: int) -> list[StateTable]:
        """The states of a batch in one group, to be read at once."""
        return [self._sequences[seq].tables[group] for seq in seqs]

    def stored_slots(self, seq: int, group: int) -> tuple[int, list[int]]:
        """The first token that a group has of a sequence, and the slots of all from there to the last one's.

        Of a state: 0, and the slot of the state.
        """
        sequence = self._sequences[seq]
        table, own = sequence.tables[group], self.groups[group]
        if isinstance(own, StateGroup):
            return 0, [own.stored_slot(table, sequence.n_tokens)]
        first = own.first_stored(table)
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

    def unpublish(self, tokens: Sequence[int], *, salt: bytes = b"") -> None:
        """Unpublish the blocks of these tokens, and empty those that no sequence uses. `salt`: as for `open`."""
        whole = array("I", tokens)
        parents = [self._hasher.root(salt)]
        for start in range(0, len(whole) // self.block_size * self.block_size, self.block_size):
            parents.append(self._hasher.key(parents[-1], whole[start : start + self.block_size]))
        for group in self.groups:
            for i, parent in enumerate(parents):
                group.unpublish(parent, whole[i * self.block_size : (i + 1) * self.block_size])

    def stats(self) -> CacheStats:
        """A frozen snapshot, in O(sequences). Engine thread only; other threads read `last_stats`."""
        rows = self._sequences.values()
        groups = tuple(
            g.stats([(row.tables[i], row.n_tokens) for row in rows]) for i, g in enumerate(self.groups)
        )
        n_evictions = sum(group.pool.n_evictions for group in self.groups)
        prefix = PrefixStats(self._n_queries, self._n_query_tokens, self._n_hit_tokens, n_evictions)
        n_tokens = sum(row.n_tokens for row in rows)
        self.last_stats = CacheStats(self.block_size, len(rows), n_tokens, groups, prefix)
        return self.last_stats

    def check_integrity(self) -> None:
        """Recount everything from the sequences up. Raises AssertionError: the mistake is ours."""
        rows = self._sequences.values()
        for i, group in enumerate(self.groups):
            group.check_integrity([(row.tables[i], row.n_tokens) for row in rows])
        for sequence in rows:
            self._check_sequence(sequence)
        for i, group in enumerate(self.groups):
            group.check_published([(row.tables[i], row.past) for row in rows], self._hasher)

    # Inside

    def _add(self, sequence: _Sequence) -> int:
        seq = self._next_seq
        self._next_seq += 1
        self.n_changes += 1
        self._sequences[seq] = sequence
        return seq

    def _new_sequence(self, salt: bytes) -> _Sequence:
        past = Timeline(self.block_size, array("I"), [self._hasher.root(salt)])
        return _Sequence(past, [group.new_table() for group in self.groups], 0)

    def _share_prefix(
        self, sequence: _Sequence, tokens: array[int], known: list[bytes], checkpoints: Sequence[int] | None
    ) -> list[BlockCopy]:
        size, root = self.block_size, sequence.past.keys[0]
        sources = [group.source for group in self.groups]
        match = find_prefix(
            sources, self._hasher, root, tokens, limit=len(tokens) - 1, block_size=size, known=known
        )
        past, n_cached = match.past, match.n_tokens
        self._adopt(sequence, past, n_cached)
        # Only now: sharing full blocks may have taken the last ones that could be evicted.
        if n_cached % size and not all(group.can_adopt_tail for group in self.groups):
            for group, table in zip(self.groups, sequence.tables, strict=True):
                group.truncate(table, 0)
            while n_cached % size:
                n_cached = longest_usable(sources, past, n_cached // size * size)
            self._adopt(sequence, past, n_cached)
        copies: list[BlockCopy] = []
        if n_cached % size:
            for group, table in zip(self.groups, sequence.tables, strict=True):
                copies += group.adopt_tail(table, past, n_cached)
        sequence.past = Timeline(size, tokens[:n_cached], past.keys[: n_cached // size + 1])
        sequence.n_slots = n_cached
        if checkpoints is not None:
            likely = checkpoints or [(len(tokens) - 1) // size * size]
            expected = [n for n in (*likely, match.n_dense) if n_cached < n < len(tokens)]
            for group, table in zip(self.groups, sequence.tables, strict=True):
                group.expect(table, expected, len(tokens))
        return copies

    def _adopt(self, sequence: _Sequence, past: Timeline, n_tokens: int) -> None:
        """Shares what is cached of the full blocks of the first `n_tokens`."""
        for i, group in enumerate(self.groups):
            sequence.tables[i] = group.adopt(past, n_tokens)

    def _count_query(self, n_tokens: int, n_hit: int, by: int) -> None:
        if self._finds_prefixes and n_tokens:
            self._n_queries += by
            self._n_query_tokens += by * n_tokens
            self._n_hit_tokens += by * n_hit

    def publish(self, sequence: _Sequence, n_before: int) -> None:
        """Lets others find the tokens that were committed after the first `n_before`."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.commit(table, sequence.n_tokens)
        if self._finds_prefixes and sequence.n_tokens > n_before:
            self._name_full_blocks(sequence)
            for group, table in zip(self.groups, sequence.tables, strict=True):
                group.publish_end(table, sequence.past, n_before=n_before)

    def _name_full_blocks(self, sequence: _Sequence) -> None:
        past = sequence.past
        for i in range(len(past.keys) - 1, past.n_nameable // self.block_size):
            past.keys.append(self._hasher.key(past.keys[i], past.block(i)))
            for group, table in zip(self.groups, sequence.tables, strict=True):
                group.publish_block(table, past, i)

    def _check_sequence(self, sequence: _Sequence) -> None:
        past = sequence.past
        assert sequence.n_slots >= len(past.tokens), "tokens without slots"
        n_full = past.n_nameable // self.block_size if self._finds_prefixes else 0
        assert len(past.keys) == 1 + n_full, "a full block without a key, or a key without a full block"
        for i, key in enumerate(past.keys[1:]):
            assert key == self._hasher.key(past.keys[i], past.block(i)), "the sequence's hash chain is broken"
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.check_slots(table, sequence.n_slots)


def _make_group(number: int, spec: GroupSpec | StateSpec, block_size: int) -> BlockGroup | StateGroup:
    if isinstance(spec, StateSpec):
        return StateGroup(number, spec, block_size)
    return BlockGroup(number, spec, block_size)
