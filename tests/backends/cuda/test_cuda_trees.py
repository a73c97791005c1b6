"""Rows of a step that are a tree, on the GPU's kernels under Triton's interpreter: as the reference has them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from motley.backends.cuda.kernels.attention import Shares, Tables, attend
from motley.backends.cuda.kernels.bundles import attend_bundles
from motley.backends.cuda.kernels.combine import combine
from motley.backends.cuda.kernels.rows import PLAIN, Rows
from motley.backends.cuda.kernels.tiles import CachePlanes
from motley.engine.trees import row_masks
from motley.graph.ops import Attention
from motley.kvcache.arena import ArenaLayer, GroupBatch, SequenceTable
from motley.kvcache.store import Store
from motley.kvcache.types import get_cache_type

pytestmark = pytest.mark.slow  # interpreted kernels: run them after a change of kernels

BLOCK, KV_HEADS, GROUP = 16, 1, 3
HEADS = slice(1, 1 + KV_HEADS)


def random_masks(rng: random.Random, n_rows: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A tree in which some branches are long and some rows have many alternatives."""
    parents = [rng.choice((i - 1, i - 1, rng.randrange(-1, i))) for i in range(n_rows - 1)]
    return np.array(row_masks(parents), np.uint64)


@pytest.mark.parametrize(
    ("kernel", "dim", "kind", "n_rows", "window"),
    [
        (attend, 64, "q8_0", 9, 3),
        (attend_bundles, 128, "f16", 5, None),
        (attend_bundles, 128, "q8_0", 35, 20),
        (attend_bundles, 128, "q4_0", 7, 3),
    ],
)
def test_a_row_sees_the_context_and_its_own_path(
    kernel: Callable[..., object], dim: int, kind: str, n_rows: int, window: int | None
) -> None:
    """A tree that ends in the middle of a block, and one at the beginning of its context."""
    torch.manual_seed(2)
    rng = random.Random(n_rows)
    keys, values = (
        Store(get_cache_type(kind), n_blocks=16, block_size=BLOCK, n_rows=3, head_dim=dim) for _ in "kv"
    )
    for store in (keys, values):
        store.write(HEADS, torch.arange(16 * BLOCK), torch.randn(16 * BLOCK, KV_HEADS, dim))
    counts, befores, firsts = (n_rows, 3), (37, 0), (BLOCK, 0)
    masks = [random_masks(rng, n_rows), np.array(row_masks([-1, -1]), np.uint64)]
    blocks = [rng.sample(range(16), 4), rng.sample(range(16), 1)]
    starts = [0, n_rows]
    tables = tuple(
        SequenceTable(starts[i], counts[i], befores[i], firsts[i], np.array(blocks[i], np.int32), masks[i])
        for i in range(2)
    )
    q = torch.randn(sum(counts), KV_HEADS * GROUP, dim)
    layer = ArenaLayer(keys, values, HEADS, 0).on(GroupBatch.of(tables, BLOCK))
    expected = Attention(0.2, window).reference([q, layer])

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    device_tables = Tables(
        torch.tensor([[*own, *[-1] * (4 - len(own))] for own in blocks], dtype=torch.int32),
        int32(*firsts), int32(0, 1), int32(*befores), n_rows, int32(*starts), int32(*counts),
        torch.from_numpy(np.concatenate(masks).view(np.int32).reshape(-1, 2)),
    )  # fmt: skip
    shares = Shares.empty(len(q), KV_HEADS * GROUP, 2, dim, "cpu", min_blocks=1)
    planes = [CachePlanes.of(kind, store.planes) for store in (keys, values)]
    kernel(q, *planes, HEADS, device_tables, shares, scale=0.2, window=window)
    rows = Rows.empty(PLAIN, len(q), q[0].numel(), "cpu")
    rows.values.fill_(torch.nan)
    out = combine(shares, device_tables, BLOCK, rows, rotate=False, window=window).values.view(q.shape)
    error = (out - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert float(error.max()) < 3e-3
