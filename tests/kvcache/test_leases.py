"""Leases: tokens appended one by one, without a reservation for each, leave the cache as reservations do."""

from __future__ import annotations

import random

import pytest

from motley.kvcache.manager import CacheManager
from motley.kvcache.sequences import GroupSpec
from motley.kvcache.states import StateSpec


def make_cache(n_blocks: int = 64, window: int | None = None, size: int = 4) -> CacheManager:
    groups = [GroupSpec("full", n_blocks)]
    return CacheManager(groups + ([GroupSpec("window", n_blocks, window)] if window else []), size)


def opened(cache: CacheManager, tokens: list[int]) -> int:
    seq = cache.open(tokens).seq
    rest = tokens[cache.n_tokens(seq) :]
    assert cache.reserve(seq, len(rest)) is not None
    cache.commit(seq, rest)
    return seq


def append_one_by_one(cache: CacheManager, seqs: list[int], tokens: list[int]) -> None:
    for seq, token in zip(seqs, tokens, strict=True):
        cache.advance(seq, cache.n_tokens(seq))
        assert cache.reserve(seq, 1) == []
        cache.commit(seq, [token])


@pytest.mark.parametrize("size", [1, 2, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 5, 8])
def test_sequences_grow_as_with_a_reservation_for_each_token(window: int | None, size: int) -> None:
    rng = random.Random(size)
    leasing, reserving = make_cache(256, window, size), make_cache(256, window, size)
    prompts = [[rng.randrange(9) for _ in range(n)] for n in (1, 3, 7, 12)]
    seqs = [[opened(cache, prompt) for prompt in prompts] for cache in (leasing, reserving)]
    lease, n_leases = None, 0
    for _ in range(40):
        tokens = [rng.randrange(9) for _ in prompts]
        append_one_by_one(reserving, seqs[1], tokens)
        positions = [leasing.n_tokens(seq) for seq in seqs[0]]
        if (
            lease is None
            or not lease.is_valid
            or any(p >= end for p, end in zip(positions, lease.ends, strict=True))
        ):
            lease = leasing.lease(seqs[0])
            n_leases += 1
        assert lease is not None
        lease.append(tokens)
        leasing.check_integrity()
        for group in range(len(leasing.groups)):
            views = [cache.tables(own, group) for cache, own in zip((leasing, reserving), seqs, strict=True)]
            assert [(v.blocks, v.n_holes, v.n_tokens) for v in views[0]] == [
                (v.blocks, v.n_holes, v.n_tokens) for v in views[1]
            ]
    assert n_leases <= 40
    if size == 16 and window is None:
        assert n_leases < 15, "a lease lasts as long as no block is full"
    found = [cache.open([*prompts[3], *[0] * 8]).n_cached for cache in (leasing, reserving)]
    assert found[0] == found[1]


@pytest.mark.parametrize("size", [1, 2, 4, 16])
@pytest.mark.parametrize("window", [None, 5])
def test_sequences_grow_by_drafts_as_with_reservations(window: int | None, size: int) -> None:
    """Slots for a draft are reserved, and any number of its tokens is committed."""
    rng = random.Random(size)
    leasing, reserving = make_cache(256, window, size), make_cache(256, window, size)
    prompts = [[rng.randrange(9) for _ in range(n)] for n in (1, 7, 12)]
    seqs = [[opened(cache, prompt) for prompt in prompts] for cache in (leasing, reserving)]
    lease, n_leases = None, 0
    for _ in range(40):
        counts = [rng.choice([1, 1, 2, 7]) for _ in prompts]
        tokens = [[rng.randrange(9) for _ in range(rng.randint(1, n))] for n in counts]
        if lease is None or not lease.is_valid or not lease.reserve(counts):
            lease = leasing.lease(seqs[0], counts)
            n_leases += 1
        assert lease is not None
        for own, other, n, committed in zip(*seqs, counts, tokens, strict=True):
            leasing.commit(own, committed)
            reserving.advance(other, reserving.n_tokens(other))
            assert reserving.reserve(other, n, n_uncertain=n - 1) == []
            reserving.commit(other, committed)
        leasing.check_integrity()
    assert n_leases < 40 or size == 1
    for own, other in zip(*seqs, strict=True):
        for cache, seq in ((leasing, own), (reserving, other)):
            cache.advance(seq, cache.n_tokens(seq))
        for group in range(len(leasing.groups)):
            mine, others = leasing.tables([own], group)[0], reserving.tables([other], group)[0]
            n_blocks = -(-mine.n_tokens // size)  # beyond, one of them may have room for a draft
            assert (mine.n_holes, mine.n_tokens) == (others.n_holes, others.n_tokens)
            assert len(mine.blocks) >= n_blocks <= len(others.blocks)
    found = [cache.open([*prompts[2], *[0] * 8]).n_cached for cache in (leasing, reserving)]
    assert found[0] == found[1]


def test_a_reservation_beyond_a_leases_blocks_is_refused_and_changes_nothing() -> None:
    cache = make_cache(size=4)
    seqs = [opened(cache, [1, 2]), opened(cache, [5, 6, 7])]
    lease = cache.lease(seqs)
    assert lease is not None
    assert not lease.reserve([1, 2])
    assert [cache._sequences[seq].n_slots for seq in seqs] == [3, 4]
    assert lease.reserve([2, 1])
    assert [cache._sequences[seq].n_slots for seq in seqs] == [4, 4]
    assert lease.is_valid
    longer = cache.lease(seqs, [1, 2])
    assert longer is not None
    assert not lease.is_valid
    assert longer.reserve([1, 5])
    cache.check_integrity()


def test_a_lease_ends_when_any_table_changes() -> None:
    cache = make_cache()
    seq, other = opened(cache, [1, 2]), opened(cache, [5, 6, 7])
    for change in (
        lambda: cache.fork(seq),
        lambda: cache.free(cache.open().seq),
        lambda: cache.truncate(other, 1),
        lambda: cache.reserve(other, 9),
        lambda: cache.shift(other, 0, 1),
    ):
        lease = cache.lease([seq]) or cache.lease([opened(cache, [9])])
        assert lease is not None
        assert lease.is_valid
        change()
        assert not lease.is_valid


def test_a_shared_block_is_not_leased_but_copied_by_a_reservation() -> None:
    cache = make_cache()
    seq = opened(cache, [1, 2])
    cache.fork(seq)
    assert cache.lease([seq]) is None
    assert cache.reserve(seq, 1) != []
    assert cache.lease([seq]) is not None


def test_there_is_no_lease_without_room_nor_with_states() -> None:
    full = make_cache(n_blocks=2, size=2)
    first, second = opened(full, [1, 2]), opened(full, [3, 4])
    assert full.lease([first, second]) is None
    full.check_integrity()
    states = CacheManager([GroupSpec("full", 8), StateSpec("states", 8, 8, 4)], 4)
    assert states.lease([opened(states, [1])]) is None
