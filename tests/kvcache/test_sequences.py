"""Block tables in one group: growth, sharing, copy-on-write, truncation, holes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.errors import ConfigError
from motley.kvcache.blocks import HOLE, slots_of
from motley.kvcache.sequences import BlockCopy, BlockGroup, BlockTable, GroupSpec

SIZE = 4


def make_group(n_blocks: int = 16, window: int | None = None) -> BlockGroup:
    return BlockGroup(0, GroupSpec("test", n_blocks, window), SIZE)


def grown(group: BlockGroup, n_tokens: int) -> BlockTable:
    table = BlockTable()
    assert group.extend(table, 0, n_tokens) == []
    group.check_integrity([(table, n_tokens)])
    return table


@pytest.mark.parametrize("spec", [{"n_blocks": 0}, {"n_blocks": 4, "window": 0}])
def test_impossible_groups_are_refused(spec: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="'full'"):
        GroupSpec("full", **spec)


def test_slots_are_block_times_size_plus_offset() -> None:
    group = make_group()
    grown(group, 1)  # takes block 0, so that blocks and entries differ
    table = BlockTable()
    group.extend(table, 0, 10)
    assert list(table.blocks) == [1, 2, 3]
    assert slots_of(table.blocks, 2, 10, 4) == [6, 7, 8, 9, 10, 11, 12, 13]
    assert slots_of(table.blocks, 5, 5, 4) == []


def test_growth_within_a_block_allocates_nothing_and_keeps_the_version() -> None:
    group = make_group()
    table = grown(group, 5)
    assert group.n_missing(table, 5, 8) == 0
    assert group.extend(table, 5, 8) == []
    assert (list(table.blocks), table.version) == ([0, 1], 0)


def test_fork_shares_all_blocks_and_the_first_writer_copies_the_last() -> None:
    group = make_group()
    table = grown(group, 6)
    twin = group.fork(table, 6)
    group.check_integrity([(table, 6), (twin, 6)])
    assert twin.blocks == table.blocks
    assert group.pool.n_used == 2

    assert group.n_missing(twin, 6, 7) == 1
    assert group.extend(twin, 6, 7) == [BlockCopy(0, src=1, dst=2, n_tokens=2)]
    assert (list(twin.blocks), twin.version) == ([0, 2], 1)
    assert group.extend(table, 6, 7) == [], "the other one is alone now and writes in place"
    group.check_integrity([(table, 7), (twin, 7)])


def test_a_fork_at_a_block_boundary_never_copies() -> None:
    group = make_group()
    table = grown(group, 8)
    twin = group.fork(table, 8)
    assert group.extend(twin, 8, 9) == []
    assert list(twin.blocks) == [0, 1, 2]


def test_a_fork_does_not_inherit_blocks_that_are_only_reserved() -> None:
    group = make_group()
    table = grown(group, 12)
    twin = group.fork(table, 5)
    assert list(twin.blocks) == [0, 1]
    group.check_integrity([(table, 5), (twin, 5)])


def test_truncation_frees_the_blocks_behind_and_bumps_the_version() -> None:
    group = make_group()
    table = grown(group, 11)
    group.truncate(table, 5)
    assert (list(table.blocks), table.version, group.pool.n_used) == ([0, 1], 1, 2)
    group.truncate(table, 5)
    assert table.version == 1, "nothing changed"
    group.truncate(table, 0)
    group.check_integrity([(table, 0)])
    assert group.pool.n_used == 0


def test_writing_behind_a_truncation_unpublishes_the_block() -> None:
    group = make_group()
    table = grown(group, 4)
    group.index.publish(table.blocks[0], b"root", [1, 2, 3, 4], b"key")
    group.truncate(table, 2)
    assert 0 in group.index, "the content is still there"
    group.extend(table, 2, 3)
    assert 0 not in group.index
    group.check_integrity([(table, 3)])


def test_writing_behind_the_published_slots_keeps_the_block_published() -> None:
    group = make_group()
    table = grown(group, 2)
    group.index.publish(table.blocks[0], b"root", [1, 2], None)
    group.extend(table, 2, 4)
    assert group.index.n_published(0) == 2


def test_published_blocks_stay_cached_and_are_evicted_last_block_first() -> None:
    group = make_group(n_blocks=3)
    table = grown(group, 12)
    group.index.publish(0, b"root", [0, 1, 2, 3], b"k0")
    group.index.publish(1, b"k0", [4, 5, 6, 7], b"k1")
    group.truncate(table, 0)
    assert group.pool.cached_blocks() == [1, 0]
    again = grown(group, 8)
    assert list(again.blocks) == [2, 1]
    assert 0 in group.index
    assert 1 not in group.index


def test_the_head_of_the_only_evictable_block_is_taken_in_place() -> None:
    group = make_group(n_blocks=1)
    table = grown(group, 3)
    group.index.publish(0, b"root", [0, 1, 2], None)
    group.truncate(table, 0)
    table = BlockTable()
    assert group.adopt_head(table, 0, 2) == []
    assert list(table.blocks) == [0]
    group.check_integrity([(table, 2)])


def test_a_window_leaves_holes_behind_it() -> None:
    group = make_group(window=5)
    table = grown(group, 12)
    group.drop_unseen(table, 11)  # sees 7 ... 11
    assert list(table.blocks) == [HOLE, 1, 2]
    group.drop_unseen(table, 3)
    assert table.n_holes == 1, "what is gone stays gone"
    group.drop_unseen(table, 12)  # sees 8 ... 12
    assert list(table.blocks) == [HOLE, HOLE, 2]
    group.check_integrity([(table, 12)])
    assert slots_of(table.blocks, 8, 12, 4) == [8, 9, 10, 11]


def test_without_a_window_nothing_is_dropped() -> None:
    group = make_group()
    table = grown(group, 12)
    group.drop_unseen(table, 12)
    assert list(table.blocks) == [0, 1, 2]


def test_forks_share_holes_and_blocks() -> None:
    group = make_group(window=5)
    table = grown(group, 11)
    group.drop_unseen(table, 11)
    twin = group.fork(table, 11)
    assert (list(twin.blocks), twin.n_holes) == ([HOLE, 1, 2], 1)
    group.check_integrity([(table, 11), (twin, 11)])


def test_truncation_into_the_window_of_holes_is_possible_only_to_nothing() -> None:
    group = make_group(window=5)
    table = grown(group, 12)
    group.drop_unseen(table, 12)
    assert [n for n in range(13) if group.can_truncate(table, n)] == [0, 12]
    group.truncate(table, 0)
    assert (len(table.blocks), table.n_holes) == (0, 0)
    group.check_integrity([(table, 0)])


def test_clearing_empties_cached_blocks_and_spares_used_ones() -> None:
    group = make_group()
    table, other = grown(group, 4), BlockTable()
    group.extend(other, 0, 4)
    group.index.publish(0, b"root", [1, 2, 3, 4], b"a")
    group.index.publish(1, b"root", [1, 2, 3, 5], b"b")
    group.truncate(table, 0)
    group.clear_cached()
    assert (group.pool.n_cached, 0 in group.index, 1 in group.index) == (0, False, True)
    group.check_integrity([(other, 4)])


def test_waste_counts_shared_tails_once_and_a_longer_owner_wins() -> None:
    group = make_group()
    table = grown(group, 8)
    twin = group.fork(table, 8)
    group.truncate(twin, 5)
    stats = group.stats([(table, 8), (twin, 5)])
    assert (stats.n_used, stats.n_shared, stats.n_slots_wasted) == (2, 2, 0)
    group.truncate(table, 6)
    stats = group.stats([(table, 6), (twin, 5)])
    assert (stats.n_slots_used, stats.n_slots_wasted, stats.waste_percent) == (8, 2, 25.0)


def test_waste_counts_reserved_blocks() -> None:
    group = make_group()
    assert group.stats([(grown(group, 12), 3)]).n_slots_wasted == 9


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 20))
def test_n_needed_covers_every_batch_and_what_it_sees(n_tokens: int, n_batch: int, window: int) -> None:
    spans = [(max(0, p - window + 1), min(p + n_batch, n_tokens)) for p in range(n_tokens)]
    worst = max(len({t // SIZE for t in range(*span)}) for span in spans)
    assert worst <= make_group(window=window).n_needed(n_tokens, n_batch) <= worst + 1


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 20))
def test_a_windowed_run_stays_within_n_needed(batches: list[int], window: int) -> None:
    group, table, n_tokens = make_group(64, window), BlockTable(), 0
    n_needed = group.n_needed(sum(batches), max(batches))
    for n_batch in batches:
        group.drop_unseen(table, n_tokens)
        group.extend(table, n_tokens, n_tokens + n_batch)
        n_tokens += n_batch
        group.check_integrity([(table, n_tokens)])
        assert group.pool.n_used <= n_needed
