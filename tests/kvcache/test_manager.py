"""The manager: the life of sequences, prefix hits, limits and figures."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from motley.errors import CacheError, ConfigError
from motley.kvcache.blocks import HOLE, slots_of
from motley.kvcache.manager import CacheManager
from motley.kvcache.sequences import BlockCopy, GroupSpec


def make_cache(n_blocks: int = 64, size: int = 4, *, find_prefixes: bool = True) -> CacheManager:
    return CacheManager([GroupSpec("full", n_blocks)], size, salt=b"model", find_prefixes=find_prefixes)


def make_windowed(n_blocks: int = 16, n_windowed: int = 8, window: int = 6) -> CacheManager:
    return CacheManager([GroupSpec("full", n_blocks), GroupSpec("window", n_windowed, window)], 4)


def run(cache: CacheManager, seq: int, tokens: Sequence[int], n_batch: int = 512) -> None:
    """Feed the rest of `tokens` as the engine would."""
    while (start := cache.n_tokens(seq)) < len(tokens):
        batch = tokens[start : start + n_batch]
        cache.advance(seq, start)
        assert cache.reserve(seq, len(batch)) is not None
        cache.commit(seq, batch)
        cache.check_integrity()


def start(cache: CacheManager, tokens: Sequence[int], n_batch: int = 512) -> int:
    seq = cache.open(tokens).seq
    run(cache, seq, tokens, n_batch)
    return seq


def blocks(cache: CacheManager, seq: int, group: int = 0) -> list[int]:
    return list(cache.tables([seq], group)[0].blocks)


@pytest.mark.parametrize("size", [0, -16, 24])
def test_odd_block_sizes_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"{size} tokens"):
        make_cache(size=size)


def test_a_cache_without_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="group"):
        CacheManager([], 16)


def test_reserve_gives_slots_and_is_repeatable_until_commit() -> None:
    cache = make_cache()
    seq = cache.open().seq
    assert cache.reserve(seq, 6) == []
    assert slots_of(blocks(cache, seq), 0, 6, 4) == [0, 1, 2, 3, 4, 5]
    assert cache.reserve(seq, 6) == []
    cache.commit(seq, [7, 8])
    assert cache.reserve(seq, 4) == []
    assert slots_of(blocks(cache, seq), 2, 6, 4) == [2, 3, 4, 5]
    cache.check_integrity()


def test_committing_more_than_reserved_is_our_mistake() -> None:
    cache = make_cache()
    seq = cache.open().seq
    cache.reserve(seq, 2)
    with pytest.raises(AssertionError, match="not reserved"):
        cache.commit(seq, [1, 2, 3])


def test_a_full_pool_says_so_and_changes_nothing() -> None:
    cache = make_windowed(n_blocks=4, n_windowed=3)
    old = start(cache, range(4))
    cache.free(start(cache, range(50, 58)))
    seq = cache.open([1, 2, 3]).seq
    before = (cache.stats(), [group.pool.cached_blocks() for group in cache.groups])
    assert cache.reserve(seq, 12) is None, "the full group has room for it, the windowed one has not"
    assert (cache.stats(), [group.pool.cached_blocks() for group in cache.groups]) == before
    assert blocks(cache, seq) == []
    assert cache.reserve(seq, 8) is not None, "by evicting what is only cached"
    cache.free(old)
    cache.check_integrity()


def test_full_blocks_are_shared_and_the_unfinished_one_is_copied() -> None:
    cache = make_cache()
    first = start(cache, range(10))
    opened = cache.open([*range(10), 99])
    assert opened.n_cached == 10
    assert opened.copies == [BlockCopy(0, src=2, dst=3, n_tokens=2)]
    assert blocks(cache, opened.seq)[:2] == blocks(cache, first)[:2]
    cache.check_integrity()


def test_the_head_of_a_diverging_block_is_copied() -> None:
    cache = make_cache()
    start(cache, range(8))
    opened = cache.open([0, 1, 2, 3, 4, 5, 99, 98, 97])
    assert (opened.n_cached, opened.copies) == (6, [BlockCopy(0, src=1, dst=2, n_tokens=2)])


def test_the_last_token_is_never_cached_for_its_logits_are_wanted() -> None:
    cache = make_cache()
    start(cache, range(8))
    opened = cache.open(range(8))
    assert (opened.n_cached, opened.copies) == (7, [BlockCopy(0, src=1, dst=2, n_tokens=3)])
    assert cache.open([0]).n_cached == 0


def test_a_freed_sequence_is_found_again_to_its_last_token() -> None:
    cache = make_cache()
    seq = start(cache, range(5))
    run(cache, seq, range(7), n_batch=1)
    cache.free(seq)
    cache.check_integrity()
    assert (cache.stats().groups[0].n_used, cache.n_evictable) == (0, 2)
    assert cache.open(range(20)).n_cached == 7


def test_a_partial_hit_without_room_for_the_copy_is_left_out() -> None:
    cache = make_cache(n_blocks=2)
    start(cache, range(6))
    opened = cache.open(range(20))
    assert (opened.n_cached, opened.copies) == (4, [])
    cache.check_integrity()


def test_salts_separate_sequences() -> None:
    cache = make_cache()
    seq = cache.open(range(8), salt=b"adapter").seq
    run(cache, seq, range(8))
    assert cache.open(range(8)).n_cached == 0
    assert cache.open(range(8), salt=b"adapter").n_cached == 7


def test_prefixes_are_not_found_when_switched_off() -> None:
    cache = make_cache(find_prefixes=False)
    seq = start(cache, range(10))
    assert cache.open(range(10)).n_cached == 0
    cache.free(seq)
    cache.check_integrity()
    assert (cache.n_evictable, cache.stats().prefix.n_queries) == (0, 0)
    assert cache.take_emptied() == [[2, 1, 0]]


def test_eviction_takes_the_least_recently_used_prefix() -> None:
    cache = make_cache(n_blocks=4)
    for begin in (0, 100):
        cache.free(start(cache, range(begin, begin + 8)))
    cache.free(cache.open(range(8)).seq)  # touches the older one
    seq = start(cache, range(200, 208))
    assert cache.stats().prefix.n_evictions >= 2
    cache.free(seq)
    assert cache.open(range(100, 108)).n_cached == 0
    assert cache.open(range(8)).n_cached >= 4


def test_fork_then_write_copies_on_write() -> None:
    cache = make_cache()
    parent = start(cache, range(6))
    child = cache.fork(parent)
    assert blocks(cache, child) == blocks(cache, parent)
    assert cache.reserve(parent, 1) == [BlockCopy(0, src=1, dst=2, n_tokens=2)]
    assert slots_of(blocks(cache, parent), 6, 7, 4) == [10]
    assert cache.reserve(child, 1) == []
    assert slots_of(blocks(cache, child), 6, 7, 4) == [6]
    cache.check_integrity()


def test_truncation_lets_other_tokens_follow() -> None:
    cache = make_cache()
    seq = start(cache, range(8))
    cache.truncate(seq, 5)
    run(cache, seq, [0, 1, 2, 3, 4, 90, 91, 92])
    assert cache.open([0, 1, 2, 3, 4, 5, 6, 7]).n_cached == 5, "the old continuation was overwritten"
    assert cache.open([0, 1, 2, 3, 4, 90, 91, 92]).n_cached == 7


def test_truncation_drops_a_reservation() -> None:
    cache = make_cache()
    seq = start(cache, range(4))
    cache.reserve(seq, 9)
    cache.truncate(seq, 4)
    assert blocks(cache, seq) == [0]
    cache.check_integrity()


def test_versions_change_only_when_a_table_does_not_just_grow() -> None:
    cache = make_cache()
    seq = start(cache, range(4))
    versions = [cache.tables([seq])[0].version]
    run(cache, seq, range(12))
    versions.append(cache.tables([seq])[0].version)
    cache.truncate(seq, 2)
    versions.append(cache.tables([seq])[0].version)
    assert versions[0] == versions[1] != versions[2]


def test_tables_follow_the_order_of_the_batch() -> None:
    cache = make_cache()
    a, b = start(cache, range(5)), start(cache, range(50, 53))
    views = cache.tables([b, a])
    assert [(list(view.blocks), view.n_tokens) for view in views] == [([2], 3), ([0, 1], 5)]
    assert memoryview(views[0].blocks).format == "i"  # type: ignore[arg-type]


def test_a_windowed_group_stays_bounded_on_a_long_run() -> None:
    cache = make_windowed(n_blocks=64, n_windowed=4, window=6)
    assert cache.can_ever_fit(200, n_batch=5)
    seq = start(cache, range(200), n_batch=5)
    # The last batch began at 195 and saw 190 and on: entry 47.
    assert blocks(cache, seq, group=1).count(HOLE) == 47
    assert cache.stats().groups[1].n_used <= 4


def test_a_windowed_prefix_is_found_although_its_beginning_is_gone() -> None:
    cache = make_windowed(n_blocks=64, n_windowed=4, window=6)
    cache.free(start(cache, range(40), n_batch=5))
    opened = cache.open(range(50))
    assert opened.n_cached == 40
    assert blocks(cache, opened.seq, group=1)[:8] == [HOLE] * 8
    cache.check_integrity()


def test_a_tail_is_left_out_if_its_full_blocks_were_the_last_that_could_be_evicted() -> None:
    cache = make_cache(n_blocks=3, size=2)
    first, second = cache.open().seq, cache.open().seq  # the same tokens at the same time: they share nothing
    run(cache, first, [0, 0, 0, 0])
    run(cache, second, [0])
    cache.free(first)
    run(
        cache, second, [0, 0, 0, 1]
    )  # evicts the first one's last block; its other block alone can be evicted now
    opened = cache.open([0, 0, 0, 0])
    assert opened.n_cached == 2
    assert opened.copies == []
    cache.check_integrity()


def test_a_windowed_prefix_keeps_what_it_sees_when_its_tail_finds_no_room() -> None:
    cache = CacheManager([GroupSpec("window", 4, window=6)], 4)
    tokens = range(15)
    start(cache, tokens, n_batch=15)
    opened = cache.open(range(20))
    assert (opened.n_cached, opened.copies) == (12, [])
    # Token 12 sees 7 and on: entry 1. With the tail, token 15 would have seen 10 and on: entry 2.
    assert blocks(cache, opened.seq) == [HOLE, 1, 2]
    cache.check_integrity()


def test_going_back_behind_a_window_is_refused_with_a_way_out() -> None:
    cache = make_windowed()
    seq = start(cache, range(20), n_batch=4)
    assert not cache.can_truncate(seq, 9)
    with pytest.raises(CacheError, match=r"20 tokens cannot go back to 9.*open it again"):
        cache.truncate(seq, 9)
    assert cache.can_truncate(seq, 17)
    cache.truncate(seq, 17)
    cache.check_integrity()


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    cache = make_windowed(n_blocks=8, n_windowed=4, window=6)
    assert cache.can_ever_fit(32, n_batch=4)
    assert not cache.can_ever_fit(32)
    with pytest.raises(
        CacheError, match=r"33 tokens need 9 blocks of 4 tokens .*'full', which has 8 \(32 tokens\)"
    ):
        cache.require_fit(33, n_batch=4)
    with pytest.raises(CacheError, match="'window', which has 4"):
        cache.require_fit(32, n_batch=16)
    cache.require_fit(32, n_batch=4)


def test_free_tokens_count_evictable_blocks_in_the_smallest_group() -> None:
    cache = make_windowed(n_blocks=8, n_windowed=4)
    assert cache.n_free_tokens == 16
    seq = start(cache, range(5))
    assert cache.n_free_tokens == 8
    cache.free(seq)
    assert (cache.n_free_tokens, cache.n_evictable) == (16, 4)
    cache.clear_prefixes()
    cache.check_integrity()
    assert (cache.n_evictable, [sorted(emptied) for emptied in cache.take_emptied()]) == (0, [[0, 1], [0, 1]])


def test_stats_report_hits_and_sharing() -> None:
    cache = make_cache()
    start(cache, range(8))
    cache.open(range(8))
    stats = cache.stats()
    assert (stats.n_sequences, stats.n_tokens, stats.groups[0].n_shared) == (2, 15, 1)
    assert (stats.prefix.n_queries, stats.prefix.n_query_tokens, stats.prefix.n_hit_tokens) == (2, 16, 7)
    assert stats.prefix.hit_percent == pytest.approx(43.75)
    assert cache.last_stats is stats


def test_integrity_notices_a_token_that_nobody_committed() -> None:
    cache = make_cache()
    seq = start(cache, range(4))
    cache._sequences[seq].past.tokens[1] = 99
    with pytest.raises(AssertionError, match="hash chain"):
        cache.check_integrity()


def test_a_mixed_workload_wastes_less_than_four_percent() -> None:
    rng = random.Random(4)
    cache = make_cache(n_blocks=12_000, size=16)
    lengths = [rng.randint(1, 900) for _ in range(200)]
    assert sum(lengths) / 200 >= 400
    for n in lengths:
        seq = cache.open().seq
        assert cache.reserve(seq, n) is not None
        cache.commit(seq, [rng.randrange(32_000) for _ in range(n)])
    stats = cache.stats()
    assert stats.n_tokens == sum(lengths) == stats.groups[0].n_slots_used - stats.groups[0].n_slots_wasted
    assert 0 < stats.groups[0].waste_percent < 4
    cache.check_integrity()


def test_a_hundred_requests_take_one_prefix_and_their_tails() -> None:
    rng = random.Random(5)
    cache = make_cache(n_blocks=1_000, size=16)
    prefix = [rng.randrange(32_000) for _ in range(1_000)]
    n_cached = []
    for i in range(100):
        prompt = [*prefix, 40_000 + i, *(rng.randrange(32_000) for _ in range(19))]
        opened = cache.open(prompt)
        n_cached.append(opened.n_cached)
        cache.reserve(opened.seq, len(prompt) - opened.n_cached)
        cache.commit(opened.seq, prompt[opened.n_cached :])
    assert n_cached == [0] + [1_000] * 99
    # 62 full blocks of the prefix; its last 8 tokens and the 20 of the tail take two blocks of each request.
    assert cache.stats().groups[0].n_used == 62 + 100 * 2
    cache.check_integrity()


def test_the_longest_fit_is_the_last_length_that_fits() -> None:
    cache = make_windowed(n_blocks=8, n_windowed=4, window=6)
    assert cache.longest_fit(100, n_batch=4) == 32
    assert cache.longest_fit(20, n_batch=4) == 20
    assert cache.longest_fit(100, n_batch=100) == 16


def test_a_shift_moves_the_end_up_and_gives_blocks_back() -> None:
    cache = make_cache()
    seq = start(cache, range(20))
    assert blocks(cache, seq) == [0, 1, 2, 3, 4]
    shifts = cache.shift(seq, n_keep=2, n_drop=9)
    assert shifts is not None
    (shift,) = shifts
    assert (shift.copies, shift.distance) == ([], 9)
    assert shift.sources == list(range(11, 20))
    assert shift.targets == list(range(2, 11))
    assert blocks(cache, seq) == [0, 1, 2]
    assert cache.n_tokens(seq) == 11
    cache.check_integrity()


def test_a_shift_writes_no_block_that_others_hold() -> None:
    cache = make_cache()
    seq = start(cache, range(20))
    fork = cache.fork(seq)
    shifts = cache.shift(seq, n_keep=2, n_drop=9)
    assert shifts is not None
    (shift,) = shifts
    assert [(copy.src, copy.n_tokens) for copy in shift.copies] == [(0, 2)]
    assert {slot // 4 for slot in shift.targets}.isdisjoint(blocks(cache, fork))
    assert blocks(cache, fork) == [0, 1, 2, 3, 4]
    cache.check_integrity()


def test_a_shift_without_room_for_copies_changes_nothing() -> None:
    cache = CacheManager([GroupSpec("full", 5)], 4)
    seq = start(cache, range(20))
    cache.fork(seq)
    assert cache.shift(seq, n_keep=2, n_drop=9) is None
    assert (cache.n_tokens(seq), blocks(cache, seq)) == (20, [0, 1, 2, 3, 4])
    cache.check_integrity()


def test_a_shift_after_which_a_window_would_see_what_it_dropped_is_refused() -> None:
    cache = make_windowed(n_blocks=64, n_windowed=16, window=9)
    seq = start(cache, range(20), n_batch=4)
    assert cache.shift(seq, n_keep=4, n_drop=12) is None  # token 8 would see the kept ones
    shifts = cache.shift(seq, n_keep=4, n_drop=8)  # token 12 sees 4 and on, which were 12 and on
    assert shifts is not None
    assert blocks(cache, seq, group=1)[0] == HOLE
    cache.check_integrity()


def test_only_what_was_kept_is_found_after_a_shift() -> None:
    cache = make_cache()
    seq = start(cache, range(20))
    assert cache.shift(seq, n_keep=5, n_drop=4) is not None
    cache.free(seq)
    assert cache.open([*range(5), *range(9, 20), 1]).n_cached == 4
    cache.check_integrity()


def test_forgotten_tokens_are_not_found_again_and_others_are() -> None:
    cache = make_cache()
    ours, others = list(range(10)), list(range(50, 60))
    for tokens in (ours, others):
        cache.free(start(cache, tokens))
    cache.unpublish(ours)
    cache.check_integrity()
    assert cache.open(ours).n_cached == 0
    assert cache.open(others).n_cached == 9


def test_forgetting_leaves_running_sequences_alone() -> None:
    cache = make_cache()
    tokens = list(range(10))
    seq = start(cache, tokens)
    held = blocks(cache, seq)
    cache.unpublish(tokens)
    cache.check_integrity()
    assert blocks(cache, seq) == held
    run(cache, seq, [*tokens, 10, 11, 12])
    cache.free(seq)
    cache.check_integrity()


def test_forgetting_keeps_what_only_begins_alike() -> None:
    cache = make_cache()
    cache.free(start(cache, [1, 2, 3, 4, 5, 6]))
    cache.free(start(cache, [1, 2, 3, 4, 9, 9]))
    cache.unpublish([1, 2, 3, 4, 9, 9])
    cache.check_integrity()
    assert cache.open([1, 2, 3, 4, 5, 6, 7]).n_cached == 0  # the first block was theirs, too
    assert cache.open([7, 2]).n_cached == 0
