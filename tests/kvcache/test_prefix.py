"""The prefix index: chained names, heads of blocks, and prefixes across windowed groups."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.kvcache.blocks import HOLE
from motley.kvcache.prefix import BlockHasher, PrefixIndex, find_prefix

SIZE = 4
HASHER = BlockHasher(b"model")
ROOT = HASHER.root()


def chain(tokens: array[int]) -> list[bytes]:
    keys = [ROOT]
    for start in range(0, len(tokens) // SIZE * SIZE, SIZE):
        keys.append(HASHER.key(keys[-1], tokens[start : start + SIZE]))
    return keys


def filled(tokens: array[int], blocks: dict[int, int], window: int | None = None) -> PrefixIndex:
    """An index that names, of the chain of `tokens`, the entries `blocks` {entry: block id}."""
    index, keys = PrefixIndex(SIZE, window), chain(tokens)
    for i, block in blocks.items():
        index.publish(block, keys[i], tokens[i * SIZE : (i + 1) * SIZE], keys[i + 1])
    index.check_integrity(HASHER)
    return index


def test_keys_depend_on_salt_past_tokens_and_secret() -> None:
    tokens = array("I", [1, 2, 3, 4])
    secret = bytes(32)
    keys = [
        HASHER.key(ROOT, tokens),
        HASHER.key(HASHER.root(b"adapter"), tokens),
        HASHER.key(HASHER.key(ROOT, tokens), tokens),
        HASHER.key(ROOT, array("I", [1, 2, 3, 5])),
        BlockHasher(b"model", secret=secret).key(ROOT, tokens),
        BlockHasher(b"model", secret=bytes(31) + b"\1").key(ROOT, tokens),
    ]
    assert len(set(keys)) == len(keys)
    again = BlockHasher(b"model", secret=secret)
    assert again.key(ROOT, tokens) == keys[4]


def test_roots_do_not_confuse_the_two_salts() -> None:
    secret = bytes(32)
    assert BlockHasher(b"a", secret=secret).root(b"bc") != BlockHasher(b"ab", secret=secret).root(b"c")


def test_full_blocks_are_found_by_key_until_forgotten() -> None:
    tokens = array("I", range(8))
    index, keys = filled(tokens, {0: 7, 1: 3}), chain(tokens)
    assert [index.find(key) for key in keys] == [None, 7, 3]
    index.unpublish(7)
    index.check_integrity(HASHER)
    assert [index.find(key) for key in keys] == [None, None, 3]
    assert 7 not in index
    assert len(index) == 1


def test_a_second_block_with_the_same_content_gets_no_name() -> None:
    tokens = array("I", range(4))
    index = filled(tokens, {0: 0})
    index.publish(1, ROOT, tokens, chain(tokens)[1])
    index.publish(2, ROOT, tokens[:2], None)
    index.check_integrity(HASHER)
    assert 1 not in index
    assert 2 not in index


def test_a_growing_block_changes_its_name() -> None:
    index, tokens = PrefixIndex(SIZE), array("I", range(4))
    index.publish(5, ROOT, tokens[:2], None)
    assert index.n_published(5) == 2
    index.publish(5, ROOT, tokens, chain(tokens)[1])
    index.check_integrity(HASHER)
    assert (index.n_published(5), len(index)) == (4, 1)
    assert index.find(chain(tokens)[1]) == 5


blocks_of_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=SIZE)


@given(st.lists(blocks_of_tokens, max_size=12), blocks_of_tokens, st.data())
def test_find_head_finds_the_longest_common_prefix(
    known: list[list[int]], query: list[int], data: st.DataObject
) -> None:
    index = PrefixIndex(SIZE)
    for block, tokens in enumerate(known):
        key = HASHER.key(ROOT, array("I", tokens)) if len(tokens) == SIZE else None
        index.publish(block, ROOT, tokens, key)
    forgotten = data.draw(st.sets(st.sampled_from(range(len(known))))) if known else set()
    for block in forgotten:
        index.unpublish(block)
    index.check_integrity(HASHER)
    common = {b: n_common(known[b], query) for b in range(len(known)) if b in index}
    block, n = index.find_head(ROOT, query)
    assert n == max(common.values(), default=0)
    assert common[block] == n if n else block == HOLE


def n_common(a: list[int], b: list[int]) -> int:
    return next(n for n in range(min(len(a), len(b)), -1, -1) if a[:n] == b[:n])


def test_a_prefix_ends_at_the_first_unknown_block_and_takes_its_head() -> None:
    known = array("I", range(12))
    index = filled(known, {0: 0, 1: 1, 2: 2})
    query = array("I", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 99, 99, 99])
    match = find_prefix([index], HASHER, ROOT, query, limit=12, block_size=SIZE)
    assert match.n_tokens == match.n_dense == 10
    assert match.past.keys == chain(known)[:3]
    assert index.visible_blocks(match.past.keys, 2) == [0, 1]
    assert index.find_head(match.past.keys[2], [8, 9]) == (2, 2)


def test_a_prefix_never_exceeds_the_limit() -> None:
    tokens = array("I", range(8))
    index = filled(tokens, {0: 0, 1: 1})
    assert find_prefix([index], HASHER, ROOT, tokens, limit=7, block_size=SIZE).n_tokens == 7


def test_a_windowed_group_needs_only_what_the_next_position_sees() -> None:
    tokens = array("I", range(20))
    full = filled(tokens, {i: i for i in range(4)})
    # After 16 tokens a window of 6 sees 11 ... 15: entries 2 and 3.
    windowed = filled(tokens, {2: 5, 3: 6}, window=6)
    match = find_prefix([full, windowed], HASHER, ROOT, tokens, limit=19, block_size=SIZE)
    assert match.n_tokens == 16
    assert full.visible_blocks(match.past.keys, 4) == [0, 1, 2, 3]
    assert windowed.visible_blocks(match.past.keys, 4) == [HOLE, HOLE, 5, 6]


def test_a_gap_inside_the_window_shortens_the_prefix_for_all_groups() -> None:
    tokens = array("I", range(20))
    full = filled(tokens, {i: i for i in range(4)})
    windowed = filled(tokens, {0: 4, 1: 5, 3: 6}, window=6)
    match = find_prefix([full, windowed], HASHER, ROOT, tokens, limit=19, block_size=SIZE)
    assert match.n_tokens == 8
    assert windowed.visible_blocks(match.past.keys, 2) == [4, 5]


@given(st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=3), st.data())
def test_the_longest_prefix_that_all_groups_can_continue(
    present: list[set[int]], data: st.DataObject
) -> None:
    tokens = array("I", range(6 * SIZE + 1))
    windows = [data.draw(st.none() | st.integers(1, 20)) for _ in present]
    indexes = [filled(tokens, {i: i for i in have}, w) for have, w in zip(present, windows, strict=True)]
    match = find_prefix(indexes, HASHER, ROOT, tokens, limit=6 * SIZE, block_size=SIZE)

    def usable(n_blocks: int, have: set[int], window: int | None) -> bool:
        position = n_blocks * SIZE
        return all(t // SIZE in have for t in range(position) if window is None or position - t < window)

    groups = list(zip(present, windows, strict=True))
    longest = max(n for n in range(7) if all(usable(n, *group) for group in groups))
    assert match.n_tokens == longest * SIZE


@pytest.mark.parametrize("damage", ["key", "child"])
def test_integrity_notices_damage(damage: str) -> None:
    index = filled(array("I", range(8)), {0: 0, 1: 1})
    if damage == "key":
        index._by_key[bytes(16)] = 0
    else:
        index._children[ROOT].clear()
    with pytest.raises(AssertionError):
        index.check_integrity(HASHER)
