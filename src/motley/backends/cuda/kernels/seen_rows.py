"""Which rows of its own step a row of a bundle sees: 64 bits, its ancestors and itself (engine.trees), as two words.

Row i of a bundle has its keys in the slot of `position + i`, and its position is that of its depth: the first row's
plus the number of its ancestors. In a chain every row sees all before it, and both are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

MAX_ROWS = 64  # of a bundle: one bit for each
CHAIN: npt.NDArray[np.uint64] = np.array([(2 << i) - 1 for i in range(MAX_ROWS)], np.uint64)


def seen_of_chains(counts: Sequence[int]) -> torch.Tensor:
    """int32 (rows, 2): of bundles with these numbers of rows, each a chain."""
    masks = np.concatenate([CHAIN[:count] for count in counts])
    return torch.from_numpy(masks.view(np.int32).reshape(-1, 2).copy())


@triton.jit
def load_seen(seen, rows, inside):
    """Loads both words of some rows; zeros for the others."""
    low = tl.load(seen + 2 * rows, inside, other=0)
    high = tl.load(seen + 2 * rows + 1, inside, other=0)
    return low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)


@triton.jit
def _n_bits(x):
    x = (x & 0x55555555) + ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x & 0x0F0F0F0F) + ((x >> 4) & 0x0F0F0F0F)
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def depth(low, high):
    """How many ancestors rows have."""
    return _n_bits(low) + _n_bits(high) - 1


@triton.jit
def hides(low, high, number, key_depth, window):
    """Whether queries, of which `low` and `high` are, do not see keys of the bundle's row `number`, which may be none.

    All of these have the shape of scores, or are broadcast to it. `key_depth`: of the key's row.
    """
    word = tl.where(number < 32, low, high)
    is_seen = ((word >> (number & 31).to(tl.uint32)) & 1) != 0
    return (number >= 0) & ~(is_seen & (depth(low, high) - key_depth < window))
