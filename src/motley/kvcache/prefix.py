"""The prefix index: finds blocks whose K/V were computed for the same tokens after the same past.

K/V at a position depend on all tokens up to it, so a block's key is a chain: key = H(parent's key, tokens).
It begins at a root that covers everything else that changes K/V (model, cache types, rotation, adapters: the
*salt*). H is BLAKE2b-128 keyed with a secret drawn per process. Clients do not know the secret, so they cannot
search for colliding prompts; a chance collision has a probability of about 2^-64 for four billion blocks. A hit on
a key therefore needs no comparison of the tokens (`check_integrity` compares them anyway).

The tokens are kept for another purpose: *partial* hits. Where the chain of full blocks ends, some block with
the same parent may still begin with the right tokens, and its head is worth a copy. The children of a parent
are sorted by their tokens; the longest common prefix with a query is always at one of the two neighbours of
the query's place, so one bisection finds it. Unfinished last blocks are published in this way only (no key).

An entry stays valid as long as its slots are not written. The caller that writes them calls `unpublish` first.
"""

from __future__ import annotations

import secrets
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

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

    def renew(self) -> None:
        """Makes all keys of earlier sequences unfindable: later sequences begin at another root."""
        self._root.update(secrets.token_bytes(32))

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
class PublishedBlock:
    """The index's entry of a block: its past, its first tokens, and its key if it is full."""

    parent: bytes
    tokens: tuple[int, ...]
    key: bytes | None


@dataclass(slots=True)
class Timeline:
    """The tokens of a sequence, and the chained keys of its full blocks."""

    block_size: int
    tokens: array[int]
    keys: list[bytes]  # the root, then the key of each full block, as far as it has one
    n_own: int | None = None  # after a shift: K/V of later tokens owe something to tokens that are gone

    @property
    def n_nameable(self) -> int:
        """Tokens whose K/V depend only on the tokens before them: eligible for prefix reuse."""
        return len(self.tokens) if self.n_own is None else min(self.n_own, len(self.tokens))

    def block(self, index: int) -> array[int]:
        """The tokens of a block."""
        return self.tokens[index * self.block_size : (index + 1) * self.block_size]

    def name_at(self, n_tokens: int) -> tuple[bytes, tuple[int, ...]]:
        """The identity of the first `n_tokens` tokens: the key of their full blocks, and the tokens after these."""
        n_full = n_tokens // self.block_size
        return self.keys[n_full], tuple(self.tokens[n_full * self.block_size : n_tokens])


class PrefixSource(Protocol):
    """The prefixes that one group of layers can continue."""

    is_sparse: bool  # a sequence can only continue after few of its lengths: those with a checkpoint

    def can_pass(self, key: bytes) -> bool:
        """Whether any prefix that contains the full block `key` may be usable."""
        ...

    def usable(self, past: Timeline, limit: int) -> int:
        """The largest n <= limit such that a sequence can continue after the first n tokens of `past`."""
        ...


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest prefix that all groups can continue from."""

    past: Timeline  # the tokens that were looked for, with the keys of full blocks that may be known
    n_tokens: int
    n_dense: int  # what it would be without the groups that need a checkpoint


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
    """The published blocks of one group: by key (full blocks) and by parent (heads of blocks)."""

    def __init__(self, block_size: int, window: int | None = None) -> None:
        self.block_size = block_size
        self.window = window
        self._published: dict[int, PublishedBlock] = {}
        self._by_key: dict[bytes, int] = {}
        self._children: dict[bytes, list[tuple[tuple[int, ...], int]]] = {}  # sorted

    def __contains__(self, block: int) -> bool:
        return block in self._published

    def __len__(self) -> int:
        return len(self._published)

    def n_published(self, block: int) -> int:
        """How many of the block's first slots are published."""
        entry = self._published.get(block)
        return len(entry.tokens) if entry else 0

    def find(self, key: bytes) -> int | None:
        """The full block with that key, if it is published."""
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

    def publish(self, block: int, parent: bytes, tokens: Sequence[int], key: bytes | None) -> None:
        """Publish a block in use, in place of what was published of it. No effect if another block has these tokens.

        `key` is the block's chained hash if it is full, None otherwise.
        """
        assert 0 < len(tokens) <= self.block_size
        assert (key is not None) == (len(tokens) == self.block_size)
        self.unpublish(block)
        entry = PublishedBlock(parent, tuple(tokens), key)
        children = self._children.setdefault(parent, [])
        at = bisect_left(children, (entry.tokens,))
        # A child that begins with these tokens sorts directly after them.
        if at < len(children) and _n_common(children[at][0], entry.tokens) == len(entry.tokens):
            return
        insort(children, (entry.tokens, block))
        self._published[block] = entry
        if key is not None:
            self._by_key[key] = block

    def unpublish(self, block: int) -> None:
        """Remove a block from the index, if it is published: its content is about to be overwritten."""
        entry = self._published.pop(block, None)
        if entry is None:
            return
        if entry.key is not None:
            del self._by_key[entry.key]
        children = self._children[entry.parent]
        del children[bisect_left(children, (entry.tokens, block))]
        if not children:
            del self._children[entry.parent]

    is_sparse = False

    def can_pass(self, key: bytes) -> bool:
        return self.window is not None or key in self._by_key

    def usable(self, past: Timeline, limit: int) -> int:
        size = self.block_size
        n_full = self.n_usable(past.keys, min(limit // size, len(past.keys) - 1))
        _, n_tail = self.find_head(past.keys[n_full], past.tokens[n_full * size : limit])
        return n_full * size + n_tail

    def visible_blocks(self, keys: Sequence[bytes], n_blocks: int) -> list[int]:
        """The first `n_blocks` full blocks, HOLE for those that the next position no longer sees."""
        first = first_visible_block(n_blocks * self.block_size, self.window, self.block_size)
        found = [self.find(key) for key in keys[1 + first : 1 + n_blocks]]
        assert None not in found, "n_usable promised these blocks"
        return [HOLE] * first + [block for block in found if block is not None]

    def published(self, block: int) -> PublishedBlock | None:
        return self._published.get(block)

    def n_usable(self, keys: Sequence[bytes], n_blocks: int) -> int:
        """The largest n <= n_blocks such that a sequence can continue after n blocks (keys[0] is the root).

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
        assert sorted(listed) == sorted(self._published), "children and published blocks differ"
        for parent, children in self._children.items():
            assert children, "a parent without children is still listed"
            assert children == sorted(children), "children out of order"
            assert all(self._published[block].parent == parent for _, block in children), (
                "a child of two parents"
            )
            assert all(self._published[block].tokens == tokens for tokens, block in children), "tokens differ"
        full = {entry.key: block for block, entry in self._published.items() if entry.key is not None}
        assert full == self._by_key, "keys and names differ"
        for entry in self._published.values():
            assert (entry.key is not None) == (len(entry.tokens) == self.block_size), (
                "a key without a full block"
            )
            assert entry.key in (None, hasher.key(entry.parent, array("I", entry.tokens))), (
                "the hash chain is broken"
            )


def find_prefix(
    sources: Sequence[PrefixSource],
    hasher: BlockHasher,
    root: bytes,
    tokens: array[int],
    limit: int,
    *,
    block_size: int,
    known: list[bytes] | None = None,
) -> PrefixMatch:
    """The longest prefix of at most `limit` of `tokens` that every group can continue from. Changes nothing.

    `known`: the root and the keys of the tokens' first blocks from an earlier call. It grows by those that are hashed.
    """
    known = [] if known is None else known
    if known[:1] != [root]:
        known[:] = [root]
    past = Timeline(block_size, tokens, [root])
    for start in range(0, limit // block_size * block_size, block_size):
        if len(known) == len(past.keys):
            known.append(hasher.key(past.keys[-1], tokens[start : start + block_size]))
        key = known[len(past.keys)]
        if not all(source.can_pass(key) for source in sources):
            break
        past.keys.append(key)
    n_dense = longest_usable([source for source in sources if not source.is_sparse], past, limit)
    return PrefixMatch(past, longest_usable(sources, past, n_dense), n_dense)


def longest_usable(sources: Sequence[PrefixSource], past: Timeline, limit: int) -> int:
    """The largest n <= limit such that every group can continue after the first n tokens."""
    # Cutting for one group may uncover a gap of another: repeat until no group cuts further.
    while (usable := min((source.usable(past, limit) for source in sources), default=limit)) < limit:
        limit = usable
    return limit


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
