"""The pool: three states, their order, and what its integrity check notices."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.kvcache.blocks import BlockPool, first_visible_block, n_blocks_for


def test_allocates_each_block_once() -> None:
    pool = BlockPool(4)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, 3]
    assert (pool.n_used, pool.n_available) == (4, 0)
    pool.check_integrity(Counter(range(4)))


def test_allocating_from_a_full_pool_is_our_mistake() -> None:
    pool = BlockPool(1)
    pool.allocate()
    with pytest.raises(AssertionError, match="full pool"):
        pool.allocate()


def test_takes_the_most_recently_emptied_block_first() -> None:
    pool = BlockPool(4)
    for _ in range(3):
        pool.allocate()
    pool.release(0, keep=False)
    pool.release(2, keep=False)
    assert [pool.allocate(), pool.allocate(), pool.allocate()] == [2, 0, 3]


def test_evicts_least_recently_used_and_only_without_empty_blocks() -> None:
    pool = BlockPool(4)
    for _ in range(3):
        pool.allocate()
    for block in (1, 0, 2):
        pool.release(block, keep=True)
    pool.touch(1)
    pool.check_integrity(Counter())
    assert pool.cached_blocks() == [0, 2, 1]
    assert pool.allocate() == 3
    assert pool.n_evictions == 0
    assert [pool.allocate() for _ in range(3)] == [0, 2, 1]
    assert pool.n_evictions == 3


def test_a_cached_block_is_revived_by_sharing_it() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release(block, keep=True)
    pool.share(block)
    assert (pool.n_refs(block), pool.n_cached, pool.n_shared) == (1, 0, 0)
    pool.check_integrity(Counter([block]))


def test_a_shared_block_is_kept_until_its_last_owner_lets_go() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.share(block)
    assert pool.n_shared == 1
    pool.release(block, keep=False)
    assert (pool.n_used, pool.n_shared) == (1, 0)
    pool.release(block, keep=False)
    assert pool.n_used == 0
    pool.check_integrity(Counter())


def test_releasing_too_often_is_our_mistake() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(0, keep=False)


def test_sharing_an_empty_block_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="nothing to share"):
        BlockPool(1).share(0)


def test_reports_emptied_blocks_once_and_not_those_taken_again() -> None:
    pool = BlockPool(4)
    for _ in range(4):
        pool.allocate()
    for block in (0, 1, 2):
        pool.release(block, keep=block == 1)
    assert pool.allocate() == 2
    assert pool.take_emptied() == [0]
    assert pool.take_emptied() == []
    pool.discard(1)
    assert pool.take_emptied() == [1]


def test_integrity_compares_references_with_the_tables() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    with pytest.raises(AssertionError, match="tables hold"):
        pool.check_integrity(Counter([block, block]))


@pytest.mark.parametrize("damage", ["lost", "twice", "two states", "shared"])
def test_integrity_notices_damage(damage: str) -> None:
    pool = BlockPool(4)
    block = pool.allocate()
    if damage == "lost":
        pool._refs[block] = 0
    elif damage == "twice":
        pool._empty.append(pool._empty[0])
    elif damage == "two states":
        pool._cached[block] = None
    else:
        pool.n_shared = 1
    with pytest.raises(AssertionError):
        pool.check_integrity()


@given(st.integers(0, 200), st.integers(1, 40), st.sampled_from([1, 2, 4, 16]))
def test_first_visible_block_holds_the_first_visible_token(position: int, window: int, size: int) -> None:
    seen = [t for t in range(position + 1) if position - t < window]
    assert first_visible_block(position, window, size) == seen[0] // size
    assert first_visible_block(position, None, size) == 0


@given(st.integers(0, 200), st.sampled_from([1, 2, 4, 16]))
def test_n_blocks_for_counts_the_blocks_of_all_positions(n_tokens: int, size: int) -> None:
    assert n_blocks_for(n_tokens, size) == len({t // size for t in range(n_tokens)})
