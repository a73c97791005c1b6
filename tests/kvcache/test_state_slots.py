"""Recurrent states in the manager: slots, checkpoints, pending tokens."""

from __future__ import annotations

import pytest

from motley.errors import CacheError, ConfigError
from motley.kvcache.manager import CacheManager
from motley.kvcache.sequences import GroupSpec
from motley.kvcache.states import NO_SLOT, StateSpec, StateTable

SIZE = 4


def make_cache(
    n_slots: int = 4, *, n_blocks: int = 64, n_rings: int = 2, n_pending: int = 3, every: int = 4096
) -> CacheManager:
    states = StateSpec("states", n_slots, n_rings, n_pending, every)
    return CacheManager([GroupSpec("full", n_blocks), states], SIZE)


def state_of(cache: CacheManager, seq: int) -> StateTable:
    return cache.states([seq], 1)[0]


def feed(cache: CacheManager, seq: int, tokens: range | list[int]) -> None:
    """Run tokens as the engine does, in as many batches as checkpoints ask for."""
    rest = list(tokens)
    while rest:
        n = cache.n_before_checkpoint(seq, len(rest))
        assert cache.reserve(seq, n) is not None
        cache.check_integrity()
        cache.commit(seq, rest[:n])
        cache.check_integrity()
        rest = rest[n:]


def opened(
    cache: CacheManager, tokens: range | list[int], checkpoints: tuple[int, ...] = ()
) -> tuple[int, int]:
    """A sequence that has run all of `tokens`, and how many of them it found."""
    found = cache.open(list(tokens), checkpoints=checkpoints)
    feed(cache, found.seq, list(tokens)[found.n_cached :])
    return found.seq, found.n_cached


def test_a_group_without_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match="'states'"):
        StateSpec("states", 0)


def test_a_sequence_writes_its_slot_in_place() -> None:
    cache = make_cache()
    seq = cache.open().seq
    feed(cache, seq, range(9))
    slot = state_of(cache, seq).slot
    feed(cache, seq, range(9, 12))
    assert (state_of(cache, seq).slot, state_of(cache, seq).n_folded) == (slot, 12)


def test_a_prompt_without_hints_gets_a_checkpoint_at_its_last_block_boundary() -> None:
    cache = make_cache()
    seq, _ = opened(cache, range(11))
    assert state_of(cache, seq).n_folded == 8, "the tokens after it are pending"
    other, n_cached = opened(cache, [*range(8), 99, 98])
    assert n_cached == 8
    cache.free(seq)
    cache.free(other)


def test_a_checkpoint_too_far_from_the_end_gets_a_batch_of_its_own() -> None:
    cache = make_cache(n_pending=2)
    found = cache.open(list(range(12)), checkpoints=(5,))
    assert cache.n_before_checkpoint(found.seq, 12) == 5
    feed(cache, found.seq, range(12))
    assert state_of(cache, found.seq).n_folded == 12
    assert opened(cache, [*range(5), 99])[1] == 5


def test_a_hit_needs_blocks_and_a_checkpoint() -> None:
    cache = make_cache()
    seq, _ = opened(cache, range(20), checkpoints=(6, 13))
    for n_common, n_found in ((20, 13), (13, 13), (12, 6), (6, 6), (5, 0)):
        prompt = [*range(n_common), 99, 98, 97]
        assert cache.open(prompt).n_cached == n_found
    cache.free(seq)
    assert cache.open([*range(20), 99, 98]).n_cached == 20, "the end of a sequence is a checkpoint"


def test_the_third_prompt_finds_where_the_second_parted_from_the_first() -> None:
    cache = make_cache(8)
    opened(cache, range(30), checkpoints=(28,))
    _, second = opened(cache, [*range(18), *range(100, 110)], checkpoints=(26,))
    assert second == 0, "blocks are there, but no state"
    _, third = opened(cache, [*range(18), *range(200, 210)])
    assert third == 18


def test_long_prompts_get_checkpoints_at_intervals() -> None:
    cache = make_cache(8, every=8)
    opened(cache, range(30), checkpoints=(29,))
    assert [cache.open([*range(n), 99, 98]).n_cached for n in (7, 8, 15, 16, 28, 29)] == [0, 8, 8, 16, 24, 29]


def test_live_sequences_start_from_the_same_checkpoint() -> None:
    cache = make_cache(6)
    first, _ = opened(cache, range(8), checkpoints=(7,))
    readers = [cache.open([*range(7), 50 + i, 60]) for i in range(3)]
    assert [r.n_cached for r in readers] == [7, 7, 7]
    assert len({state_of(cache, r.seq).slot for r in readers}) == 1
    for reader in readers:
        feed(cache, reader.seq, [50, 60])
    assert len({state_of(cache, seq).slot for seq in (first, *(r.seq for r in readers))}) == 4


def test_a_published_state_is_overwritten_only_where_there_is_no_other_slot() -> None:
    cache = make_cache(n_slots=1)
    seq, _ = opened(cache, range(9), checkpoints=(6,))
    assert state_of(cache, seq).n_folded == 6, "a checkpoint, with pending tokens"
    assert cache.open([*range(6), 99]).n_cached == 6
    cache.check_integrity()


def test_reserve_refuses_without_a_slot_and_changes_nothing() -> None:
    cache = make_cache(n_slots=1)
    opened(cache, range(5))
    other = cache.open().seq
    before = cache.stats()
    assert cache.reserve(other, 3) is None
    assert cache.stats() == before
    cache.check_integrity()


def test_checkpoints_are_evicted_least_recently_used_first() -> None:
    cache = make_cache(n_slots=3)
    for start in (0, 100, 200):
        cache.free(opened(cache, range(start, start + 6))[0])
    cache.free(cache.open([*range(6), 99]).seq)  # makes it the latest
    cache.check_integrity()
    opened(cache, range(300, 306))
    assert [cache.open([*range(n, n + 6), 99]).n_cached for n in (0, 100, 200)] == [4, 0, 4]


@pytest.mark.parametrize("n_right", range(4))
def test_uncertain_tokens_can_be_rejected(n_right: int) -> None:
    cache = make_cache()
    seq = cache.open().seq
    feed(cache, seq, range(6))
    assert cache.reserve(seq, 4, n_uncertain=3) is not None
    cache.commit(seq, [6])
    for token in range(7, 7 + n_right):
        cache.commit(seq, [token])
    cache.check_integrity()
    table = state_of(cache, seq)
    assert (cache.n_tokens(seq), table.n_folded) == (7 + n_right, 7)
    assert cache.reserve(seq, 1) is not None
    assert (table.next_folded, table.next_ring) == (8 + n_right, NO_SLOT), "pending tokens are folded in"
    cache.commit(seq, [50])
    cache.check_integrity()


def test_uncertain_tokens_can_be_truncated_and_others_cannot() -> None:
    cache = make_cache()
    seq = cache.open().seq
    feed(cache, seq, range(6))
    assert cache.reserve(seq, 4, n_uncertain=2) is not None
    cache.commit(seq, [6, 7, 8, 9])
    assert [n for n in range(11) if n <= 10 and cache.can_truncate(seq, n)] == [0, 8, 9, 10]
    with pytest.raises(CacheError, match=r"cannot go back to 7: .*recurrent states"):
        cache.truncate(seq, 7)
    cache.truncate(seq, 9)
    feed(cache, seq, [60, 61])
    assert state_of(cache, seq).n_folded == 11


def test_without_a_ring_nothing_is_uncertain() -> None:
    assert make_cache(n_rings=0).max_uncertain == 0
    assert make_cache().max_uncertain == 3


def test_a_fork_shares_state_and_pending_tokens() -> None:
    cache = make_cache(n_rings=3)
    seq = cache.open().seq
    feed(cache, seq, range(6))
    assert cache.reserve(seq, 2, n_uncertain=1) is not None
    cache.commit(seq, [6, 7])
    twin = cache.fork(seq)
    cache.check_integrity()
    one, other = state_of(cache, seq), state_of(cache, twin)
    assert (one.slot, one.ring) == (other.slot, other.ring)
    assert cache.reserve(seq, 2, n_uncertain=1) is not None
    assert cache.reserve(twin, 2, n_uncertain=1) is not None
    cache.check_integrity()
    assert len({one.next_slot, other.next_slot, one.slot}) == 3
    assert one.next_ring != one.ring
    cache.commit(seq, [8, 9])
    cache.commit(twin, [18, 19])
    cache.check_integrity()


def test_a_fork_ends_a_reservation_in_place() -> None:
    cache = make_cache()
    seq = cache.open().seq
    feed(cache, seq, range(6))
    assert cache.reserve(seq, 1) is not None
    assert state_of(cache, seq).next_slot == state_of(cache, seq).slot
    cache.fork(seq)
    assert state_of(cache, seq).next_slot == NO_SLOT
    cache.check_integrity()


def test_a_failed_batch_leaves_no_checkpoint() -> None:
    cache = make_cache()
    seq, _ = opened(cache, range(9), checkpoints=(4,))
    cache.reserve(seq, 1)
    cache.free(seq, copies_done=False)
    cache.check_integrity()
    assert cache.open([*range(9), 99]).n_cached == 4


def test_a_restored_state_is_found_as_it_was_saved() -> None:
    cache = make_cache()
    restored = cache.restore(range(10))
    assert restored is not None
    assert restored.slots[1] == [state_of(cache, restored.seq).next_slot]
    cache.commit(restored.seq, range(10))
    cache.free(restored.seq)
    cache.check_integrity()
    assert cache.open([*range(10), 99]).n_cached == 10


def test_other_salts_do_not_find_a_state() -> None:
    cache = make_cache()
    cache.free(opened(cache, range(9))[0])
    assert cache.open([*range(9), 99], salt=b"4 layers").n_cached == 0


def test_states_refuse_to_shift() -> None:
    cache = make_cache()
    seq, _ = opened(cache, range(9))
    assert cache.shift(seq, 2, 3) is None
    cache.check_integrity()


def test_clearing_forgets_checkpoints() -> None:
    cache = make_cache()
    cache.free(opened(cache, range(9))[0])
    cache.clear_prefixes()
    cache.check_integrity()
    assert cache.open([*range(9), 99]).n_cached == 0
    assert cache.stats().groups[1].n_used == 0


def test_an_overwritten_checkpoint_is_found_no_more() -> None:
    cache = make_cache(n_slots=1)
    seq, _ = opened(cache, range(9), checkpoints=(6,))
    feed(cache, seq, range(9, 12))
    assert state_of(cache, seq).n_folded == 12
    assert cache.open([*range(6), 99]).n_cached == 0


def test_a_shared_ring_is_not_overwritten() -> None:
    cache = make_cache(n_slots=6, n_rings=3)
    seq = cache.open().seq
    feed(cache, seq, range(6))
    assert cache.reserve(seq, 2, n_uncertain=1) is not None
    cache.commit(seq, [6, 7])
    cache.fork(seq)
    assert cache.reserve(seq, 2, n_uncertain=1) is not None
    assert state_of(cache, seq).next_ring != state_of(cache, seq).ring
