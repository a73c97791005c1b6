"""Recurrent states: a slot for each sequence, and checkpoints that later sequences continue from.

A state includes all tokens of its past and cannot go back, so a group of such layers keeps whole states in *slots*:

    live         of a sequence, written by every batch
    checkpoint   published under the tokens that it includes; read-only, shared, evicted least recently used first

A batch reads a state from one slot and may write it to another one. So nothing is ever copied: a sequence that begins
at a checkpoint, a fork, and a sequence whose own slot has become a checkpoint read it and write to a new slot. The
slot that is read stays reserved until the batch is committed.

*Pending* tokens: the slot's state can be up to `n_pending` tokens behind the sequence. The inputs of these tokens are
in a *ring*, at position mod n_pending, and the next batch applies them first. Rejecting the last tokens of a batch
therefore costs nothing (speculation), and a checkpoint shortly before the end of a prompt needs no batch of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from motley.errors import ConfigError
from motley.kvcache.blocks import BlockPool
from motley.kvcache.groups import ANY_NUMBER, BlockCopy, BlockShift, CacheGroup, GroupStats
from motley.kvcache.prefix import BlockHasher, Timeline

NO_SLOT = -1
_Name = tuple[bytes, tuple[int, ...]]  # the key of the full blocks, and the tokens after them


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The layers with a recurrent state: how many slots and rings there are, and the tokens of a ring."""

    name: str
    n_slots: int
    n_rings: int = 0
    n_pending: int = 0
    every: int = 4096  # a long prompt gets a checkpoint after each `every` tokens

    def __post_init__(self) -> None:
        if self.n_slots < 1:
            raise ConfigError(
                f"KV cache group {self.name!r} has {self.n_slots} state slots, but needs at least one",
                hint="raise the KV cache's limit",
            )


@dataclass(slots=True)
class StateTable:
    """One sequence's state. Only `StateGroup` changes it."""

    slot: int = NO_SLOT  # of the state after the first `n_folded` tokens; NO_SLOT: zeros, nothing is folded
    n_folded: int = 0
    ring: int = NO_SLOT  # of the tokens from n_folded on
    next_slot: int = NO_SLOT  # reserved: where the next batch writes the state; may be `slot`
    next_folded: int = 0
    next_ring: int = NO_SLOT
    expected: list[int] = field(default_factory=list)  # ascending: lengths for which a checkpoint is wanted


class StateIndex:
    """The published states, by the tokens that they include."""

    is_sparse = True

    def __init__(self) -> None:
        self._names: dict[int, _Name] = {}
        self._slots: dict[bytes, dict[tuple[int, ...], int]] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._names

    def name(self, slot: int) -> _Name | None:
        return self._names.get(slot)

    def find(self, name: _Name) -> int | None:
        return self._slots.get(name[0], {}).get(name[1])

    def after(self, parent: bytes, tokens: tuple[int, ...]) -> list[int]:
        """The states after the block `parent` that include no other tokens than these."""
        found = self._slots.get(parent, {})
        return [slot for tail, slot in found.items() if tail == tokens[: len(tail)]]

    def publish(self, slot: int, name: _Name) -> None:
        """Publish a state. No effect if there is one of the same tokens."""
        if self.find(name) is None:
            self.unpublish(slot)
            self._names[slot] = name
            self._slots.setdefault(name[0], {})[name[1]] = slot

    def unpublish(self, slot: int) -> None:
        """Remove a state, if it is published: it is about to be overwritten."""
        name = self._names.pop(slot, None)
        if name is not None:
            del self._slots[name[0]][name[1]]
            if not self._slots[name[0]]:
                del self._slots[name[0]]

    def can_pass(self, key: bytes) -> bool:
        return True

    def usable(self, past: Timeline, limit: int) -> int:
        """The most tokens up to `limit` for which there is a checkpoint; 0: none."""
        size = past.block_size
        for n_full in range(min(limit // size, len(past.keys) - 1), -1, -1):
            start = n_full * size
            tails = [
                len(tail)
                for tail in self._slots.get(past.keys[n_full], ())
                if start + len(tail) <= limit and tuple(past.tokens[start : start + len(tail)]) == tail
            ]
            if tails:
                return start + max(tails)
        return 0

    def check_integrity(self) -> None:
        listed = {slot: (key, tail) for key, tails in self._slots.items() for tail, slot in tails.items()}
        assert listed == self._names, "states and their names differ"
        assert all(self._slots.values()), "a key without states is still listed"


class StateGroup(CacheGroup[StateTable]):
    """The slots, the rings and the checkpoints of all layers with a recurrent state."""

    def __init__(self, number: int, spec: StateSpec, block_size: int) -> None:
        self.number = number
        self.spec = spec
        self.name = spec.name
        self.unit = "state slots"
        self.block_size = block_size
        self.pool = BlockPool(spec.n_slots)
        self.rings = BlockPool(max(1, spec.n_rings))
        self.index = StateIndex()

    @property
    def source(self) -> StateIndex:
        return self.index

    @property
    def n_free_tokens(self) -> int:
        return ANY_NUMBER if self.pool.n_available else 0

    @property
    def max_uncertain(self) -> int:
        return self.spec.n_pending if self.spec.n_rings else 0

    def n_needed(self, n_tokens: int, n_batch: int) -> int:
        return 1

    def has_room(self, table: StateTable, n_tokens: int, n_slots: int, n_uncertain: int = 0) -> bool:
        assert n_uncertain <= self.max_uncertain, f"{n_uncertain} tokens cannot stay pending"
        has_slot = not self._must_allocate(table) or self.pool.n_available > 0
        return has_slot and (n_uncertain == 0 or self._has_ring(table))

    def must_copy(self, table: StateTable, n_tokens: int) -> bool:
        return False

    # A table, from its beginning to its end

    def new_table(self) -> StateTable:
        return StateTable()

    def can_restore(self, n_tokens: int) -> bool:
        return self.pool.n_available > 0

    def restored_table(self, n_tokens: int) -> StateTable:
        return StateTable(next_slot=self._allocate(), next_folded=n_tokens)

    def extend(
        self, table: StateTable, n_tokens: int, n_slots: int, n_new: int = 0, n_uncertain: int = 0
    ) -> list[BlockCopy]:
        """Reserve the slot and, for pending tokens, the ring that the next `n_new` tokens are written to."""
        if table.next_slot == NO_SLOT:
            table.next_slot = self._next_slot(table)
        end = n_tokens + n_new
        if not n_uncertain and self._has_ring(table):
            n_uncertain = end - self._checkpoint_inside(table, n_tokens, end)
        table.next_folded = end - n_uncertain
        self._drop_next_ring(table)
        if n_uncertain:
            is_own = table.ring != NO_SLOT and self.rings.n_refs(table.ring) == 1
            table.next_ring = table.ring if is_own else self.rings.allocate()
        return []

    def commit(self, table: StateTable, n_tokens: int) -> None:
        if table.next_slot == NO_SLOT:
            return
        assert table.n_folded <= table.next_folded <= n_tokens, (
            "the state includes tokens that are not committed"
        )
        if table.next_slot != table.slot:
            self._release(table.slot)
        if table.next_ring != table.ring:
            self._release_ring(table.ring)
        table.slot, table.n_folded, table.ring = table.next_slot, table.next_folded, table.next_ring
        table.next_slot = table.next_ring = NO_SLOT

    def note_begun(self, table: StateTable, n_tokens: int) -> None:
        self.commit(table, n_tokens)

    def drop_unseen(self, table: StateTable, position: int) -> None:
        return

    def fork(self, table: StateTable, n_tokens: int) -> StateTable:
        """A second table with the same state. A reservation to write it in place ends: it is shared now."""
        self._drop_reservation(table)
        if table.slot != NO_SLOT:
            self.pool.share(table.slot)
        if table.ring != NO_SLOT:
            self.rings.share(table.ring)
        return StateTable(table.slot, table.n_folded, table.ring)

    def can_truncate(self, table: StateTable, n_tokens: int) -> bool:
        return n_tokens == 0 or n_tokens >= table.n_folded

    def truncate(self, table: StateTable, n_tokens: int) -> None:
        """Reject pending tokens from `n_tokens` on, or give up the state."""
        assert self.can_truncate(table, n_tokens), "the state includes later tokens"
        self._drop_reservation(table)
        if n_tokens == 0:
            self._release(table.slot)
            self._release_ring(table.ring)
            table.slot = table.ring = NO_SLOT
            table.n_folded = 0

    def can_shift(self, table: StateTable, n_tokens: int, n_keep: int, n_drop: int) -> bool:
        return False  # a state always includes all tokens of its past

    def shift(self, table: StateTable, n_tokens: int, n_keep: int, n_drop: int) -> BlockShift:
        raise AssertionError("a recurrent state cannot remove tokens from its past")

    # Checkpoints

    def adopt(self, past: Timeline, n_tokens: int) -> StateTable:
        if not n_tokens:
            return StateTable()
        slot = self.index.find(past.name_at(n_tokens))
        assert slot is not None, "the search promised this checkpoint"
        self.pool.share(slot)
        return StateTable(slot, n_tokens)

    @property
    def can_adopt_tail(self) -> bool:
        return True  # nothing is copied

    def adopt_tail(self, table: StateTable, past: Timeline, n_tokens: int) -> list[BlockCopy]:
        return []

    def expect(self, table: StateTable, positions: Iterable[int], n_tokens: int) -> None:
        every = range(self.spec.every, n_tokens, self.spec.every)
        table.expected = sorted({n for n in (*positions, *every) if table.n_folded < n})

    def n_before_checkpoint(self, table: StateTable, n_tokens: int, n_new: int) -> int:
        """All of them if the checkpoint can be made inside of the batch, by a ring; otherwise those before it."""
        end = n_tokens + n_new
        if self._has_ring(table) and self._checkpoint_inside(table, n_tokens, end) < end:
            return n_new
        inside = [n for n in table.expected if n_tokens < n < end]
        return inside[0] - n_tokens if inside else n_new

    def publish_block(self, table: StateTable, past: Timeline, index: int) -> None:
        return

    def publish_end(self, table: StateTable, past: Timeline, *, n_before: int | None) -> None:
        """Make the state a checkpoint if one is expected here, or if the sequence ends."""
        is_expected = table.n_folded in table.expected
        table.expected = [n for n in table.expected if n > table.n_folded]
        if table.slot != NO_SLOT and (is_expected or n_before is None):
            self.index.publish(table.slot, past.name_at(table.n_folded))

    def unpublish(self, parent: bytes, tokens: Sequence[int]) -> None:
        for slot in self.index.after(parent, tuple(tokens)):
            self.index.unpublish(slot)
            if self.pool.is_cached(slot):
                self.pool.discard(slot)

    def clear_cached(self) -> None:
        for slot in self.pool.cached_blocks():
            self.index.unpublish(slot)
            self.pool.discard(slot)

    # Views

    def stored_slot(self, table: StateTable, n_tokens: int) -> int:
        """The slot that has the state after all tokens, or will have it after a restore."""
        if table.next_slot != NO_SLOT:
            return table.next_slot
        assert table.n_folded == n_tokens, "tokens are pending"
        return table.slot

    def stats(self, tables: Sequence[tuple[StateTable, int]]) -> GroupStats:
        pool = self.pool
        return GroupStats(
            self.name, pool.n_blocks, pool.n_used, pool.n_cached, pool.n_shared, 0, 0, is_state=True
        )

    def check_integrity(self, tables: Sequence[tuple[StateTable, int]]) -> None:
        slots: Counter[int] = Counter()
        rings: Counter[int] = Counter()
        for table, n_tokens in tables:
            assert table.n_folded <= n_tokens <= table.n_folded + self.spec.n_pending, (
                "pending tokens are lost"
            )
            assert (table.slot == NO_SLOT) == (table.n_folded == 0), "tokens without a state"
            assert table.ring != NO_SLOT or table.n_folded == n_tokens, "pending tokens without a ring"
            slots.update({table.slot, table.next_slot} - {NO_SLOT})
            rings.update({table.ring, table.next_ring} - {NO_SLOT})
            if table.next_slot == table.slot != NO_SLOT:
                assert self.pool.n_refs(table.slot) == 1, "a shared state would be overwritten"
                assert table.slot not in self.index, "a checkpoint would be overwritten"
        self.pool.check_integrity(slots)
        self.rings.check_integrity(rings)
        cached = set(self.pool.cached_blocks())
        findable = {slot for slot in range(self.spec.n_slots) if slot in self.index}
        assert cached == {slot for slot in findable if not slots[slot]}, "cached and findable states differ"

    def check_published(self, tables: Sequence[tuple[StateTable, Timeline]], hasher: BlockHasher) -> None:
        self.index.check_integrity()
        for table, past in tables:
            if table.slot in self.index:
                assert self.index.name(table.slot) == past.name_at(table.n_folded), "a state of other tokens"

    def check_slots(self, table: StateTable, n_slots: int) -> None:
        assert table.next_slot == NO_SLOT or table.next_folded <= n_slots, "a state of tokens without slots"

    # Inside

    def _must_allocate(self, table: StateTable) -> bool:
        if table.next_slot != NO_SLOT:
            return False
        return table.slot == NO_SLOT or self.pool.n_refs(table.slot) > 1

    def _next_slot(self, table: StateTable) -> int:
        """A new slot if the state is shared; if it is only published, a new one where there is one."""
        if self._must_allocate(table) or (table.slot in self.index and self.pool.n_available):
            return self._allocate()
        self.index.unpublish(table.slot)
        return table.slot

    def _has_ring(self, table: StateTable) -> bool:
        if not self.spec.n_rings:
            return False
        is_own = table.ring != NO_SLOT and self.rings.n_refs(table.ring) == 1
        return table.next_ring != NO_SLOT or is_own or self.rings.n_available > 0

    def _checkpoint_inside(self, table: StateTable, n_tokens: int, end: int) -> int:
        """The only expected length before `end`, if the tokens after it can stay pending; otherwise `end`."""
        inside = [n for n in table.expected if n_tokens < n < end]
        return inside[0] if len(inside) == 1 and end - inside[0] <= self.spec.n_pending else end

    def _drop_reservation(self, table: StateTable) -> None:
        if table.next_slot != table.slot:
            self._release(table.next_slot)
        table.next_slot = NO_SLOT
        self._drop_next_ring(table)

    def _drop_next_ring(self, table: StateTable) -> None:
        if table.next_ring != table.ring:
            self._release_ring(table.next_ring)
        table.next_ring = NO_SLOT

    def _allocate(self) -> int:
        slot = self.pool.allocate()
        self.index.unpublish(slot)
        return slot

    def _release(self, slot: int) -> None:
        if slot != NO_SLOT:
            self.pool.release(slot, keep=slot in self.index)

    def _release_ring(self, ring: int) -> None:
        if ring != NO_SLOT:
            self.rings.release(ring, keep=False)
