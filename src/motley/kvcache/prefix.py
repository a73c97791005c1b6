"""The prefix index: finds blocks whose K/V were computed for the same tokens after the same past.

K/V at a position depend on all tokens up to it, so a block's name is a chain: key = H(parent's key, tokens).
It begins at a root that covers everything else that changes K/V (model, cache types, rotation, adapters: the
*salt*). H is BLAKE2b-128 keyed with a secret drawn per process. Nobody outside knows the secret, so nobody
can search for colliding prompts; what is left is chance, about 2^-64 for four billion blocks. A hit on a key
therefore needs no second look at the tokens (`check_integrity` takes that look anyway).

The tokens are kept for another purpose: *partial* hits. Where the chain of full blocks ends, some block with
the same parent may still begin with the right tokens, and its head is worth a copy. The children of a parent
are sorted by their tokens; the longest common prefix with a query is always at one of the two neighbours of
the query's place, so one bisection finds it. Unfinished last blocks are named in this way only (no key).

A name stays valid as long as the named slots are not written. The one who writes calls `forget` first.
"""

from __future__ import annotations

import secrets
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from motley.kvcache.blocks import HOLE, first_visible_block

KEY_BYTES = 16


class BlockHasher:
    """Keyed, chained names of full blocks. One per process and cache; keys mean nothing elsewhere."""

    def __init__(self, salt: bytes = b"", *, secret: bytes | None = None) -> None:
        secret = secrets.token_bytes(32) if secret is None else secret
        # `person` keeps the two uses apart: no choice of salt can imitate a block.
        self._block = blake2b(key=secret, digest_size=KEY_BYTES, person=b"motley kv block")
        self._root = blake2b(key=secret, digest_size=KEY_BYTES, person=b"motley kv root")
        self._root.update(len(salt).to_bytes(8, "little") + salt)

    def root(self, salt: bytes = b"") -> bytes:
        """The parent of a sequence's first block; `salt` is what is special about that sequence."""
        state = self._root.copy()
        state.update(salt)
        return state.digest()

    def key(self, parent: bytes, tokens: array[int]) -> bytes:
        """The name of the full block `tokens` (array of "I") after `parent`."""
        state = self._block.copy()
        state.update(parent)
        state.update(tokens)
        return state.digest()


@dataclass(frozen=True, slots=True)
class BlockName:
    """What the index knows of a block: its past, its first tokens, and its key if it is full."""

    parent: bytes
    tokens: tuple[int, ...]
    key: bytes | None


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest known prefix: full blocks to share, and a head of one more block to copy, per group."""

    keys: list[bytes]  # the root, then the key of each matched full block
    blocks: tuple[list[int], ...]  # per group: the full blocks, HOLE for those that the next token cannot see
    n_tail: int  # tokens of the next block that are known too; 0: none
    tails: tuple[int, ...]  # per group: the block that begins with these tokens (if n_tail)


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """How often opened sequences found their beginning."""

    n_queries: int
    n_query_tokens: int
    n_hit_tokens: int
    n_evictions: int  # blocks, over all groups

    @property
    def hit_percent(self) -> float:
        return 100 * self.n_hit_tokens / self.n_query_tokens if self.n_query_tokens else 0.0


class PrefixIndex:
    """Names of blocks in one group: by key (full blocks) and by parent (heads of blocks)."""

    def __init__(self, block_size: int, window: int | None = None) -> None:
        self.block_size = block_size
        self.window = window
        self._names: dict[int, BlockName] = {}
        self._by_key: dict[bytes, int] = {}
        self._children: dict[bytes, list[tuple[tuple[int, ...], int]]] = {}  # sorted

    def __contains__(self, block: int) -> bool:
        return block in self._names

    def __len__(self) -> int:
        return len(self._names)

    def n_named(self, block: int) -> int:
        """How many of the block's first slots its name vouches for."""
        name = self._names.get(block)
        return len(name.tokens) if name else 0

    def find(self, key: bytes) -> int | None:
        """The full block of that name."""
        return self._by_key.get(key)

    def find_head(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """The block after `parent` that begins with the most of `tokens`, and how many (HOLE, 0: none)."""
        query = tuple(tokens[: self.block_size])
        children = self._children.get(parent, [])
        at = bisect_left(children, (query,))
        best, n_best = HOLE, 0
        for candidate, block in children[max(0, at - 1) : at + 1]:
            n_common = _n_common(candidate, query)
            if n_common > n_best:
                best, n_best = block, n_common
        return best, n_best

    def add(self, block: int, parent: bytes, tokens: Sequence[int], key: bytes | None) -> None:
        """Name a block in use, in place of the name it had. Without effect if another block is as good.

        `key` is the block's chained hash if it is full, None otherwise.
        """
        assert 0 < len(tokens) <= self.block_size
        assert (key is not None) == (len(tokens) == self.block_size)
        self.forget(block)
        name = BlockName(parent, tuple(tokens), key)
        children = self._children.setdefault(parent, [])
        at = bisect_left(children, (name.tokens,))
        # Whatever begins with these tokens sorts right behind them.
        if at < len(children) and _n_common(children[at][0], name.tokens) == len(name.tokens):
            return
        insort(children, (name.tokens, block))
        self._names[block] = name
        if key is not None:
            self._by_key[key] = block

    def forget(self, block: int) -> None:
        """Drop a block's name, if it has one: its content is about to go."""
        name = self._names.pop(block, None)
        if name is None:
            return
        if name.key is not None:
            del self._by_key[name.key]
        children = self._children[name.parent]
        del children[bisect_left(children, (name.tokens, block))]
        if not children:
            del self._children[name.parent]

    def name_of(self, block: int) -> BlockName | None:
        return self._names.get(block)

    def n_usable(self, keys: Sequence[bytes], n_blocks: int) -> int:
        """The largest n <= n_blocks such that a sequence can go on after n blocks (keys[0] is the root).

        Only the blocks that the next position still sees must be there.
        """
        while n_blocks:
            first = first_visible_block(n_blocks * self.block_size, self.window, self.block_size)
            missing = next(
                (i for i in range(n_blocks - 1, first - 1, -1) if keys[i + 1] not in self._by_key), None
            )
            if missing is None:
                break
            n_blocks = missing  # every length in between sees the missing block, too
        return n_blocks

    def check_integrity(self, hasher: BlockHasher) -> None:
        """Recompute keys and recount children. Raises AssertionError."""
        listed = [block for children in self._children.values() for _, block in children]
        assert sorted(listed) == sorted(self._names), "children and names differ"
        for parent, children in self._children.items():
            assert children, "a parent without children is still listed"
            assert children == sorted(children), "children out of order"
            assert all(self._names[block].parent == parent for _, block in children), "a child of two parents"
            assert all(self._names[block].tokens == tokens for tokens, block in children), "tokens differ"
        full = {name.key: block for block, name in self._names.items() if name.key is not None}
        assert full == self._by_key, "keys and names differ"
        for name in self._names.values():
            assert (name.key is not None) == (len(name.tokens) == self.block_size), (
                "a key without a full block"
            )
            assert name.key in (None, hasher.key(name.parent, array("I", name.tokens))), (
                "the hash chain is broken"
            )


def find_prefix(
    indexes: Sequence[PrefixIndex], hasher: BlockHasher, root: bytes, tokens: array[int], limit: int
) -> PrefixMatch:
    """The longest prefix of at most `limit` of `tokens` that every group can continue from. Changes nothing.

    A group without a window needs every block. A windowed group needs only those that the next position sees,
    so that a prefix may be found whose early blocks it dropped long ago.
    """
    size = indexes[0].block_size
    keys = [root]
    for start in range(0, limit // size * size, size):
        key = hasher.key(keys[-1], tokens[start : start + size])
        if any(index.window is None and index.find(key) is None for index in indexes):
            break
        keys.append(key)
    n_full = len(keys) - 1
    # Cutting for one windowed group may uncover a gap of another: repeat until nobody objects.
    while (n_usable := min(index.n_usable(keys, n_full) for index in indexes)) < n_full:
        n_full = n_usable
    keys = keys[: n_full + 1]
    heads = [index.find_head(keys[-1], tokens[n_full * size : limit]) for index in indexes]
    n_tail = min(n for _, n in heads)
    blocks = tuple(_visible_blocks(index, keys, n_full * size) for index in indexes)
    return PrefixMatch(keys, blocks, n_tail, tuple(block for block, _ in heads))


def _visible_blocks(index: PrefixIndex, keys: Sequence[bytes], position: int) -> list[int]:
    """The full blocks of the chain, HOLE for those that a query at `position` no longer sees."""
    first = first_visible_block(position, index.window, index.block_size)
    found = [index.find(key) for key in keys[1 + first :]]
    assert None not in found, "n_usable promised these blocks"
    return [HOLE] * first + [block for block in found if block is not None]


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
