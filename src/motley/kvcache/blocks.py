"""The block pool: reference counts of the KV cache's blocks, and which blocks are free.

A block is an id in range(n_blocks), the same on every device. It is in exactly one of three states:

    used    n_refs >= 1: that many block tables hold it
    cached  n_refs == 0, but its content can still be found (prefix index): kept until its room is needed
    empty   n_refs == 0, nothing worth keeping

    empty ──allocate──▶ used ──release(keep=False)──▶ empty
    cached ──share──▶ used ──release(keep=True)──▶ cached ──allocate (no empty one left) / discard──▶ …

Empty blocks are taken most recently freed first (their memory is warm and, when demand-paged, resident);
cached blocks are evicted least recently used first, and only when no empty block is left. Every step is O(1).

Threads: the engine thread alone, like everything in this package (see manager.py).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

HOLE = -1  # in a block table: the block that stood here was dropped behind the window


def n_blocks_for(n_tokens: int, block_size: int) -> int:
    """How many blocks hold `n_tokens` tokens that begin at a block's start."""
    return -(-n_tokens // block_size)


def first_visible_block(position: int, window: int | None, block_size: int) -> int:
    """The table index of the first block that a query at `position` reads.

    A query at p sees the keys t with p - window < t <= p; without a window, all t <= p.
    """
    return 0 if window is None else max(0, position - window + 1) // block_size


def slots_of(
    blocks: Sequence[int] | npt.NDArray[np.int32], start: int, end: int, block_size: int
) -> list[int]:
    """The slots of the tokens start … end - 1 of a block table: block * block_size + offset."""
    slots: list[int] = []
    while start < end:
        stop = min(end, (start // block_size + 1) * block_size)
        first = int(blocks[start // block_size]) * block_size + start % block_size
        slots.extend(range(first, first + stop - start))
        start = stop
    return slots


class BlockPool:
    """Reference counts, the empty stack and the eviction order of `n_blocks` blocks."""

    def __init__(self, n_blocks: int) -> None:
        assert n_blocks >= 1, n_blocks
        self.n_blocks = n_blocks
        self.n_shared = 0  # blocks that more than one table holds
        self.n_evictions = 0  # cached blocks that had to make room, ever
        self._refs = [0] * n_blocks
        # A stack whose top is block 0, so that a young pool fills its arena densely from the bottom.
        self._empty = list(range(n_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._emptied: dict[int, None] = {}  # used as an ordered set

    @property
    def n_cached(self) -> int:
        return len(self._cached)

    @property
    def n_available(self) -> int:
        """How many times `allocate` succeeds from here on."""
        return len(self._empty) + len(self._cached)

    @property
    def n_used(self) -> int:
        return self.n_blocks - self.n_available

    def n_refs(self, block: int) -> int:
        return self._refs[block]

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def allocate(self) -> int:
        """Take a block, with one reference. The caller has checked `n_available`.

        The block may be an evicted one: the caller unpublishes it from the prefix index.
        """
        assert self.n_available, "allocate() on a full pool: check n_available first"
        if self._empty:
            block = self._empty.pop()
            self._emptied.pop(block, None)
        else:
            block, _ = self._cached.popitem(last=False)
            self.n_evictions += 1
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more reference to a used block, or the first one to a cached block (a prefix hit)."""
        if self._refs[block] == 0:
            assert block in self._cached, f"block {block} is empty: nothing to share"
            del self._cached[block]
        elif self._refs[block] == 1:
            self.n_shared += 1
        self._refs[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """One reference less. Without any left, the block is cached if `keep`, else empty."""
        assert self._refs[block] > 0, f"block {block} is released more often than it was taken"
        self._refs[block] -= 1
        if self._refs[block] == 1:
            self.n_shared -= 1
        elif self._refs[block] == 0 and keep:
            self._cached[block] = None
        elif self._refs[block] == 0:
            self._put_empty(block)

    def touch(self, block: int) -> None:
        """Mark a block as just used, if it is cached: it goes last to eviction."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def discard(self, block: int) -> None:
        """Make a cached block empty. The caller unpublishes it from the prefix index."""
        del self._cached[block]
        self._put_empty(block)

    def cached_blocks(self) -> list[int]:
        """The cached blocks, the next to be evicted first."""
        return list(self._cached)

    def take_emptied(self) -> list[int]:
        """Blocks that became empty since the last call and still are: an arena may give their memory back."""
        emptied = list(self._emptied)
        self._emptied.clear()
        return emptied

    def _put_empty(self, block: int) -> None:
        self._empty.append(block)
        self._emptied[block] = None

    def check_integrity(self, expected_refs: Counter[int] | None = None) -> None:
        """Recount all states; against the tables' references too, where given. Raises AssertionError."""
        used = {block for block, n in enumerate(self._refs) if n > 0}
        empty, cached = set(self._empty), set(self._cached)
        assert min(self._refs) >= 0, "negative reference count"
        assert len(empty) == len(self._empty), "a block is twice on the empty stack"
        assert used.isdisjoint(empty | cached), "a block in use is up for grabs"
        assert empty.isdisjoint(cached), "a block is both empty and cached"
        assert used | empty | cached == set(range(self.n_blocks)), "a block is lost"
        assert set(self._emptied) <= empty, "a block that is not empty would be given back"
        assert self.n_shared == sum(n > 1 for n in self._refs), "shared blocks are miscounted"
        if expected_refs is not None:
            counted = {block: self._refs[block] for block in used}
            assert counted == dict(expected_refs), (
                f"references {counted}, but the tables hold {dict(expected_refs)}"
            )
