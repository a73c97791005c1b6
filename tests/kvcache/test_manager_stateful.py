"""Thousands of random operations on the manager, against a model that stores every K/V there is.

The model's K/V at a position is a digest of the token and the K/V before it, down to the salt: what real K/V
depend on. It is written to slots as `reserve` says, copied and moved as the lists of copies and shifts say, and
wiped where blocks are reported empty.
After each step, whatever a later query could see through a table must be exactly the sequence's own.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from motley.errors import CacheError
from motley.kvcache.blocks import HOLE, slots_of
from motley.kvcache.manager import CacheManager
from motley.kvcache.sequences import BlockCopy, GroupSpec
from thorough import examples

UNWRITTEN = b"unwritten"
# Two letters make shared prefixes likely, and small pools make everything else happen.
tokens_lists = st.integers(1, 12).flatmap(lambda n: st.lists(st.integers(0, 1), min_size=n, max_size=n))
salts = st.sampled_from([b"", b"", b"", b"adapter"])


@dataclass
class ModelSequence:
    """The truth about one sequence."""

    salt: bytes
    tokens: list[int] = field(default_factory=list)
    kvs: list[bytes] = field(default_factory=list)  # K/V of each token
    min_position: int = 0  # the farthest `advance`
    shifted_at: int = 0  # its length after the latest shift: what no window saw then, a shift need not move

    def append(self, tokens: Sequence[int]) -> None:
        """A token's K/V come of what is in the cache before it, whatever has been forgotten since that was made."""
        for token in tokens:
            self.kvs.append(next_kv(self.kvs[-1] if self.kvs else self.salt, token))
            self.tokens.append(token)

    def cut(self, start: int, stop: int | None = None) -> None:
        del self.tokens[start:stop]
        del self.kvs[start:stop]


def next_kv(last: bytes, token: int) -> bytes:
    return hashlib.md5(last + bytes([token])).digest()


def kv(salt: bytes, tokens: Sequence[int]) -> bytes:
    """K/V of the last token, computed from the first on."""
    return reduce(next_kv, tokens, salt)


class CacheMachine(RuleBasedStateMachine):
    """Every rule is a call that the engine may make at that moment."""

    sequences = Bundle("sequences")
    seen: ClassVar[Counter[str]] = Counter()  # over all examples: what has been put to the test

    @initialize(
        target=sequences,
        size=st.sampled_from([4, 4, 2, 1]),
        n_blocks=st.lists(st.integers(8, 40), min_size=3, max_size=3),
        windows=st.sampled_from([(None,), (None, 5), (None, 1, 9), (6,), (3, 8)]),
        find_prefixes=st.sampled_from([True, True, True, False]),
        tokens=tokens_lists,
    )
    def start(
        self,
        size: int,
        n_blocks: list[int],
        windows: tuple[int | None, ...],
        find_prefixes: bool,
        tokens: list[int],
    ) -> int:
        self.size, self.windows = size, windows
        specs = [GroupSpec(f"g{i}", n, w) for i, (n, w) in enumerate(zip(n_blocks, windows, strict=False))]
        self.cache = CacheManager(specs, size, find_prefixes=find_prefixes)
        self.model: dict[int, ModelSequence] = {}
        self.arenas = [[UNWRITTEN] * (spec.n_blocks * size) for spec in specs]
        self.pasts: dict[bytes, tuple[bytes, list[int]]] = {}  # what the index's keys stand for
        return self.open(tokens, b"")

    def copy(self, copies: list[BlockCopy]) -> None:
        for copy in copies:
            arena, n = self.arenas[copy.group], copy.n_tokens
            src, dst = copy.src * self.size, copy.dst * self.size
            assert 0 < n < self.size
            assert src != dst
            arena[dst : dst + n] = arena[src : src + n]

    def everything(self) -> Any:
        """All that a refused call must leave alone."""
        tables = [
            [(list(view.blocks), view.n_tokens, view.version) for view in self.cache.tables(self.model, i)]
            for i in range(len(self.windows))
        ]
        return tables, [group.pool.cached_blocks() for group in self.cache.groups], self.cache.stats()

    @rule(target=sequences, tokens=tokens_lists, salt=salts)
    def open(self, tokens: list[int], salt: bytes) -> int:
        """Open a sequence and compute what is not cached, if there is room."""
        opened = self.cache.open(tokens, salt=salt)
        assert 0 <= opened.n_cached <= max(0, len(tokens) - 1)
        self.seen["hits"] += opened.n_cached > 0
        self.seen["partial hits"] += len(opened.copies)
        self.copy(opened.copies)
        self.model[opened.seq] = ModelSequence(salt, min_position=opened.n_cached)
        self.model[opened.seq].append(tokens[: opened.n_cached])
        self.every_sequence_reads_its_own_past()
        if rest := tokens[opened.n_cached :]:
            self.run_batch(opened.seq, rest, 0, True)
        return opened.seq

    @rule(target=sequences, like=sequences, share=st.floats(0, 1), more=tokens_lists)
    def restore(self, like: int, share: float, more: list[int]) -> Any:
        """Bring a sequence's K/V from elsewhere; they may be in the cache already."""
        known = self.model[like].tokens
        tokens = [*known[: round(share * len(known))], *more]
        before = self.everything()
        restored = self.cache.restore(tokens)
        if restored is None:
            assert self.everything() == before
            return multiple()  # no new sequence
        self.seen["restored"] += 1
        sequence = ModelSequence(b"", min_position=len(tokens) - 1)
        sequence.append(tokens)
        for arena, first, slots in zip(self.arenas, restored.firsts, restored.slots, strict=True):
            for content, slot in zip(sequence.kvs[first:], slots, strict=True):
                arena[slot] = content
        self.cache.commit(restored.seq, tokens)
        self.model[restored.seq] = sequence
        self.remember_pasts(sequence)
        return restored.seq

    @rule(target=sequences, like=sequences, share=st.floats(0, 1), more=tokens_lists)
    def open_like(self, like: int, share: float, more: list[int]) -> int:
        other = self.model[like]
        return self.open([*other.tokens[: round(share * len(other.tokens))], *more], other.salt)

    @rule(seq=sequences, tokens=tokens_lists, n_rejected=st.integers(0, 6), advance=st.booleans())
    def run_batch(self, seq: int, tokens: list[int], n_rejected: int, advance: bool) -> None:
        """Store a batch, of which the last tokens may be rejected drafts."""
        sequence = self.model[seq]
        if advance:
            self.advance(seq, 0)
        before = self.everything()
        room = self.cache.reserve(seq, len(tokens))
        if room is None:
            assert self.everything() == before
            assert self.is_too_large(seq, len(tokens))
            self.seen["full"] += 1
            return
        self.copy(room)
        self.seen["copies on write"] += len(room)
        n_before = len(sequence.tokens)
        sequence.append(tokens)
        for number, arena in enumerate(self.arenas):
            table = self.cache.tables([seq], number)[0].blocks
            for i, slot in enumerate(
                slots_of(table, n_before, n_before + len(tokens), self.cache.block_size)
            ):
                arena[slot] = sequence.kvs[n_before + i]
        n_accepted = max(0, len(tokens) - n_rejected)
        sequence.cut(n_before + n_accepted)
        self.cache.commit(seq, tokens[:n_accepted])
        self.remember_pasts(sequence)

    @rule(seq=sequences, keep=st.integers(0, 9), share=st.floats(0, 1))
    def shift(self, seq: int, keep: int, share: float) -> None:
        """Forget tokens in the middle, as an endless generation does."""
        sequence = self.model[seq]
        n_tokens = len(sequence.tokens)
        n_keep = min(keep, n_tokens)
        n_drop = round(share * (n_tokens - n_keep))
        if not n_drop:
            return
        before = self.everything()
        shifts = self.cache.shift(seq, n_keep, n_drop)
        if shifts is None:
            assert self.everything() == before
            return
        self.seen["shifts"] += 1
        for shift in shifts:
            arena = self.arenas[shift.group]
            self.copy(shift.copies)
            moved = [arena[slot] for slot in shift.sources]
            for slot, content in zip(shift.targets, moved, strict=True):
                arena[slot] = content
        sequence.cut(n_keep, n_keep + n_drop)
        sequence.min_position = sequence.shifted_at = len(sequence.tokens)

    def remember_pasts(self, sequence: ModelSequence) -> None:
        hasher = self.cache._hasher
        key = hasher.root(sequence.salt)
        for n in range(0, len(sequence.tokens) + 1, self.size):
            self.pasts[key] = (sequence.salt, sequence.tokens[:n])
            key = hasher.key(key, array("I", sequence.tokens[n : n + self.size]))

    def is_too_large(self, seq: int, n_new: int) -> bool:
        """Whether some group has no room, counted from its table: a copy takes one block at most."""
        for i, group in enumerate(self.cache.groups):
            view = self.cache.tables([seq], i)[0]
            n_missing = (view.n_tokens + n_new - 1) // self.size + 1 - len(view.blocks)
            if max(0, n_missing) + 1 > group.pool.n_available:
                return True
        return False

    @rule(seq=sequences, back=st.integers(0, 3))
    def advance(self, seq: int, back: int) -> None:
        sequence = self.model[seq]
        position = max(0, len(sequence.tokens) - back)
        self.cache.advance(seq, position)
        sequence.min_position = max(sequence.min_position, position)
        self.seen["holes"] += any(
            HOLE in self.cache.tables([seq], i)[0].blocks for i in range(len(self.windows))
        )

    @rule(target=sequences, seq=sequences, tokens=tokens_lists, parent_goes_on=st.booleans())
    def fork(self, seq: int, tokens: list[int], parent_goes_on: bool) -> int:
        child = self.cache.fork(seq)
        parent = self.model[seq]
        self.model[child] = ModelSequence(
            parent.salt, list(parent.tokens), list(parent.kvs), parent.min_position, parent.shifted_at
        )
        if parent_goes_on:
            self.run_batch(seq, tokens, 0, True)
        return child

    @rule(seq=sequences, share=st.floats(0, 1))
    def truncate(self, seq: int, share: float) -> None:
        sequence = self.model[seq]
        n_kept = round(share * len(sequence.tokens))
        if not self.cache.can_truncate(seq, n_kept):
            assert 0 < n_kept < sequence.min_position
            before = self.everything()
            with pytest.raises(CacheError, match="cannot go back"):
                self.cache.truncate(seq, n_kept)
            assert self.everything() == before
            return
        self.cache.truncate(seq, n_kept)
        sequence.cut(n_kept)
        if n_kept == 0:
            sequence.min_position = 0

    @rule(seq=sequences, n_wrong=st.integers(1, 3), tokens=tokens_lists)
    def correct(self, seq: int, n_wrong: int, tokens: list[int]) -> None:
        """Take back the last tokens and write others in their place."""
        n_kept = max(0, len(self.model[seq].tokens) - n_wrong)
        if self.cache.can_truncate(seq, n_kept):
            self.cache.truncate(seq, n_kept)
            self.model[seq].cut(n_kept)
            self.run_batch(seq, tokens[:n_wrong], 0, False)

    @rule(seq=consumes(sequences), give_back=st.booleans())
    def free(self, seq: int, give_back: bool) -> None:
        self.cache.free(seq)
        del self.model[seq]
        if give_back:
            self.give_memory_back()

    @rule(target=sequences, seq=consumes(sequences))
    def preempt_and_resume(self, seq: int) -> int:
        sequence = self.model[seq]
        self.free(seq, give_back=True)
        return self.open(sequence.tokens, sequence.salt)

    @precondition(lambda self: self.cache.n_evictable > 8)
    @rule()
    def clear_prefixes(self) -> None:
        self.cache.clear_prefixes()
        assert self.cache.n_evictable == 0
        self.give_memory_back()

    def give_memory_back(self) -> None:
        for arena, emptied in zip(self.arenas, self.cache.take_emptied(), strict=True):
            for block in emptied:
                arena[block * self.size : (block + 1) * self.size] = [UNWRITTEN] * self.size

    @invariant()
    def is_sound(self) -> None:
        self.cache.check_integrity()

    @invariant()
    def every_sequence_reads_its_own_past(self) -> None:
        for i, (arena, window) in enumerate(zip(self.arenas, self.windows, strict=True)):
            for view, sequence in zip(self.cache.tables(self.model, i), self.model.values(), strict=True):
                n_tokens = len(sequence.tokens)
                assert view.n_tokens == n_tokens
                for t in range(n_tokens):
                    block = view.blocks[t // self.size]
                    if block == HOLE:
                        assert window is not None
                        assert n_tokens - t >= window
                    elif window is None or t > sequence.shifted_at - window:
                        assert arena[block * self.size + t % self.size] == sequence.kvs[t]

    @invariant()
    def every_findable_block_holds_what_its_name_says(self) -> None:
        for group, arena in zip(self.cache.groups, self.arenas, strict=True):
            for block in range(group.pool.n_blocks):
                if (name := group.index.published(block)) is not None:
                    salt, past = self.pasts[name.parent]
                    slots = arena[block * self.size : block * self.size + len(name.tokens)]
                    tokens = [*past, *name.tokens]
                    assert slots == [kv(salt, tokens[: len(past) + i + 1]) for i in range(len(slots))]

    @invariant()
    def figures_add_up(self) -> None:
        stats = self.cache.stats()
        assert (stats.n_sequences, stats.n_tokens) == (
            len(self.model),
            sum(len(sequence.tokens) for sequence in self.model.values()),
        )
        for i, group in enumerate(stats.groups):
            views = self.cache.tables(self.model, i)
            slots = {
                (view.blocks[t // self.size], t % self.size)
                for view in views
                for t in range(view.n_tokens)
                if view.blocks[t // self.size] != HOLE
            }
            assert group.n_slots_used - group.n_slots_wasted == len(slots)

    def teardown(self) -> None:
        """Without sequences nothing is used, and all of the pool can be had."""
        for seq in self.model:
            self.cache.free(seq)
        self.cache.check_integrity()
        assert all(group.pool.n_available == group.pool.n_blocks for group in self.cache.groups)
        self.seen["evictions"] += self.cache.stats().prefix.n_evictions


def test_random_operations_never_mix_up_or_lose_a_token() -> None:
    CacheMachine.seen.clear()
    quick = settings(
        max_examples=examples(80),
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    run_state_machine_as_test(CacheMachine, settings=quick)
    # A machine that mostly idles would pass as well; these are seen a hundred times in an ordinary run.
    wanted = ["hits", "partial hits", "copies on write", "full", "holes", "evictions", "shifts", "restored"]
    assert [what for what in wanted if CacheMachine.seen[what] == 0] == []
