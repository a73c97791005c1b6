"""Attention over the cache, and what leads into it, under Triton's interpreter, against the ops' references."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from motley.backends.cuda.kernels.attention import Shares, Tables, attend
from motley.backends.cuda.kernels.bundles import attend_bundles
from motley.backends.cuda.kernels.bundles import tuning_of as bundle_tuning_of
from motley.backends.cuda.kernels.combine import combine
from motley.backends.cuda.kernels.gate import gated
from motley.backends.cuda.kernels.norm import rms_norm, scale_of
from motley.backends.cuda.kernels.rope_and_store import RopeTable, rope_and_store
from motley.backends.cuda.kernels.router import norm_and_logits
from motley.backends.cuda.kernels.rows import HALVES, INT8, PLAIN, Rows
from motley.backends.cuda.kernels.seen_rows import seen_of_chains
from motley.backends.cuda.kernels.tiles import CachePlanes
from motley.graph.ops import Activation, Attention, Hadamard, RmsNorm, Rope
from motley.kvcache.arena import ArenaLayer, GroupBatch, SequenceTable
from motley.kvcache.store import Store
from motley.kvcache.types import get_cache_type

pytestmark = pytest.mark.slow  # interpreted kernels: run them after a change of kernels

BLOCK, DIM, KV_HEADS, GROUP = 16, 64, 2, 3
HEADS = slice(1, 1 + KV_HEADS)  # of three rows in the stores


def make_store(kind: str, dim: int = DIM) -> Store:
    return Store(get_cache_type(kind), n_blocks=8, block_size=BLOCK, n_rows=3, head_dim=dim)


def planes(store: Store) -> CachePlanes:
    return CachePlanes.of(store.kind.name, store.planes)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("k_kind", "v_kind", "window"),
    [("f16", "f16", None), ("q8_0", "q8_0", 20), ("q4_0", "q4_0", None), ("q8_0", "q4_0", None)],
)
def test_decode_attention_over_shuffled_blocks(k_kind: str, v_kind: str, window: int | None) -> None:
    torch.manual_seed(1)
    keys, values = make_store(k_kind), make_store(v_kind)
    everywhere = torch.arange(8 * BLOCK)
    for store in (keys, values):
        store.write(HEADS, everywhere, torch.randn(len(everywhere), KV_HEADS, DIM))
    lengths, firsts, blocks = (53, 7), (0, BLOCK), ([5, 2, 7, 0], [3, 6])  # the second table lacks a block
    tables = tuple(
        SequenceTable(r, 1, first + n - 1, first, np.array(table, np.int32))
        for r, (n, first, table) in enumerate(zip(lengths, firsts, blocks, strict=True))
    )
    q = torch.randn(2, KV_HEADS * GROUP, DIM)
    layer = ArenaLayer(keys, values, HEADS, 0).on(GroupBatch.of(tables, BLOCK))
    expected = Attention(0.2, window).reference([q, layer])

    device_tables = Tables(
        torch.tensor([[5, 2, 7, 0], [3, 6, -1, -1]], dtype=torch.int32),
        int32(*firsts), int32(0, 1), int32(*(f + n - 1 for f, n in zip(firsts, lengths, strict=True))),
    )  # fmt: skip
    shares = Shares.empty(2, KV_HEADS * GROUP, 3, DIM, "cpu", min_blocks=1)
    attend(q, planes(keys), planes(values), HEADS, device_tables, shares, scale=0.2, window=window)
    rows = Rows.empty(PLAIN, 2, KV_HEADS * GROUP * DIM, "cpu")
    out = combine(shares, device_tables, BLOCK, rows, rotate=False, window=window).values.view(q.shape)
    assert float((out - expected).norm() / expected.norm()) < 2e-3

    rotated = combine(shares, device_tables, BLOCK, rows, rotate=True, window=window).values.view(q.shape)
    expected = expected @ Hadamard(DIM).reference([])
    assert float((rotated - expected).norm() / expected.norm()) < 2e-3

    sinks = torch.linspace(
        -8, 12, KV_HEADS * GROUP
    )  # from one that does not count to one that outweighs all scores
    expected = Attention(0.2, window).reference([q, layer, sinks])
    out = combine(shares, device_tables, BLOCK, rows, rotate=False, window=window, sinks=sinks)
    assert float((out.values.view(q.shape) - expected).norm() / expected.norm()) < 2e-3
    halves = Rows.empty(HALVES, 2, KV_HEADS * GROUP * DIM, "cpu", fixed=32)
    out = combine(shares, device_tables, BLOCK, halves, rotate=False, window=window, sinks=sinks)
    assert float((out.unpack().view(q.shape) - expected).norm() / expected.norm()) < 2e-3
    totals = out.values.float().unflatten(1, (32, -1)).sum(1)
    assert torch.allclose(out.total.float(), totals, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dim", [160, 256])
def test_wide_heads_of_bytes(dim: int) -> None:
    """Their codes are made values before the product."""
    torch.manual_seed(1)
    keys, values = make_store("q8_0", dim), make_store("q8_0", dim)
    for store in (keys, values):
        store.write(HEADS, torch.arange(8 * BLOCK), torch.randn(8 * BLOCK, KV_HEADS, dim))
    table, q = (
        SequenceTable(0, 1, 52, 0, np.array([5, 2, 7, 0], np.int32)),
        torch.randn(1, KV_HEADS * GROUP, dim),
    )
    layer = ArenaLayer(keys, values, HEADS, 0).on(GroupBatch.of((table,), BLOCK))
    expected = Attention(0.1, None).reference([q, layer])
    tables = Tables(int32(5, 2, 7, 0)[None], int32(0), int32(0), int32(52))
    shares = Shares.empty(1, KV_HEADS * GROUP, 2, dim, "cpu", min_blocks=1)
    attend(q, planes(keys), planes(values), HEADS, tables, shares, scale=0.1)
    rows = Rows.empty(PLAIN, 1, KV_HEADS * GROUP * dim, "cpu")
    out = combine(shares, tables, BLOCK, rows, rotate=False).values.view(q.shape)
    assert float((out - expected).norm() / expected.norm()) < 2e-3


WAYS = {"attend": (attend, 64), "attend_bundles": (attend_bundles, 128)}  # the kernel, and dims of heads
BUNDLES: list[tuple[str, str, int | None, int]] = [
    ("f16", "f16", None, 4),
    ("q8_0", "q8_0", 20, 8),
    ("q8_0", "q8_0", 3, 16),
    ("q4_0", "q4_0", None, 8),
    ("q4_0", "f16", 30, 4),
]


@pytest.mark.parametrize(
    ("k_kind", "v_kind", "window", "most_rows", "way"),
    [*((*bundle, way) for bundle in BUNDLES for way in WAYS), ("bf16", "q5_1", 17, 16, "attend")],
)
def test_rows_of_a_bundle_read_the_context_together(
    k_kind: str, v_kind: str, window: int | None, most_rows: int, way: str
) -> None:
    """Three sequences with several rows each, one of which begins a block, and a bundle that pads the batch."""
    kernel, dim = WAYS[way]
    torch.manual_seed(3)
    keys, values = make_store(k_kind, dim), make_store(v_kind, dim)
    for store in (keys, values):
        store.write(HEADS, torch.arange(8 * BLOCK), torch.randn(8 * BLOCK, KV_HEADS, dim))
    counts = most_rows, 1, most_rows // 2 - 1
    befores, firsts, blocks = (46, 0, BLOCK + 3), (0, 0, BLOCK), ([5, 2, 7, 0], [3], [6, 4])
    starts = [sum(counts[:i]) for i in range(3)]
    tables = tuple(
        SequenceTable(start, count, before, first, np.array(table, np.int32))
        for start, count, before, first, table in zip(starts, counts, befores, firsts, blocks, strict=True)
    )
    q = torch.randn(sum(counts), KV_HEADS * GROUP, dim)
    layer = ArenaLayer(keys, values, HEADS, 0).on(GroupBatch.of(tables, BLOCK))
    expected = Attention(0.2, window).reference([q, layer])

    device_tables = Tables(
        torch.tensor([[5, 2, 7, 0], [3, -1, -1, -1], [6, 4, -1, -1]], dtype=torch.int32),
        int32(*firsts), int32(0, 1, 2, 0), int32(*befores, -BLOCK), most_rows,
        int32(*starts, 0), int32(*counts, 0), seen_of_chains(counts),
    )  # fmt: skip
    shares = Shares.empty(len(q), KV_HEADS * GROUP, 3, dim, "cpu", min_blocks=1)
    kernel(q, planes(keys), planes(values), HEADS, device_tables, shares, scale=0.2, window=window)
    rows = Rows.empty(PLAIN, len(q), q[0].numel(), "cpu")
    rows.values.fill_(torch.nan)
    out = combine(shares, device_tables, BLOCK, rows, rotate=False, window=window).values.view(q.shape)
    error = (out - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert float(error.max()) < 3e-3


def test_bundles_have_as_many_splits_as_programs_fit() -> None:
    for kind in ("q8_0", "f16"):
        found = [bundle_tuning_of(n, kind, kind) for n in (2, 16, 17, 32, 64, 256)]
        assert [tuning.n_queries for tuning in found] == [16, 16, 32, 32, 64, 64]
        assert found[-1].n_splits(1, 256, 8) == 264 // (8 * 4)
        assert found[0].n_splits(64, 16, 8) == 1


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_a_bundle_does_not_read_what_others_left_in_its_blocks(kind: str) -> None:
    """Numbers that are no numbers, behind its last token and in the block that follows its own in a round."""
    torch.manual_seed(1)
    keys, values = make_store(kind, 128), make_store(kind, 128)
    n, n_rows = BLOCK + 9, 3
    table = SequenceTable(0, n_rows, n - n_rows, 0, np.array([5, 2], np.int32))
    visible = table.slots(BLOCK)
    for store in (keys, values):
        store.write(HEADS, torch.arange(8 * BLOCK), torch.full((8 * BLOCK, KV_HEADS, 128), torch.nan))
        store.write(HEADS, visible, torch.randn(len(visible), KV_HEADS, 128))
    q = torch.randn(n_rows, KV_HEADS * GROUP, 128)
    layer = ArenaLayer(keys, values, HEADS, 0).on(GroupBatch.of((table,), BLOCK))
    expected = Attention(0.1, None).reference([q, layer])
    tables = Tables(
        int32(5, 2)[None],
        int32(0),
        int32(0),
        int32(n - n_rows),
        4,
        int32(0),
        int32(n_rows),
        seen_of_chains([3]),
    )
    shares = Shares.empty(n_rows, KV_HEADS * GROUP, 2, 128, "cpu", min_blocks=1)
    attend_bundles(q, planes(keys), planes(values), HEADS, tables, shares, scale=0.1)
    rows = Rows.empty(PLAIN, n_rows, q[0].numel(), "cpu")
    out = combine(shares, tables, BLOCK, rows, rotate=False).values.view(q.shape)
    assert float((out - expected).norm() / expected.norm()) < 2e-3


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0", "q5_1"])
def test_what_others_left_in_a_block_is_not_read(kind: str, window: int | None) -> None:
    """Numbers that are no numbers, of a sequence that overflowed, before the window and behind the last token."""
    torch.manual_seed(1)
    keys, values = make_store(kind), make_store(kind)
    n, blocks = BLOCK + 9, [5, 2]
    table = SequenceTable(0, 1, n - 1, 0, np.array(blocks, np.int32))
    visible = table.slots(BLOCK)[-window if window else 0 :]
    for store in (keys, values):
        store.write(HEADS, torch.arange(8 * BLOCK), torch.full((8 * BLOCK, KV_HEADS, DIM), torch.nan))
        store.write(HEADS, visible, torch.randn(len(visible), KV_HEADS, DIM))
    q = torch.randn(1, KV_HEADS * GROUP, DIM)
    k, v = (store.read(HEADS, visible).repeat_interleave(GROUP, 1) for store in (keys, values))
    weights = torch.softmax(torch.einsum("qhd,thd->qht", q, k) * 0.2, -1)
    expected = torch.einsum("qht,thd->qhd", weights, v)

    tables = Tables(int32(*blocks)[None], int32(0), int32(0), int32(n - 1))
    shares = Shares.empty(1, KV_HEADS * GROUP, 2, DIM, "cpu", min_blocks=1)
    attend(q, planes(keys), planes(values), HEADS, tables, shares, scale=0.2, window=window)
    rows = Rows.empty(PLAIN, 1, q[0].numel(), "cpu")
    out = combine(shares, tables, BLOCK, rows, rotate=False, window=window).values.view(q.shape)
    assert float((out - expected).norm() / expected.norm()) < 2e-3


@pytest.mark.parametrize(
    ("k_kind", "v_kind", "style"), [("f16", "q8_0", "halves"), ("q4_0", "f16", "interleaved")]
)
def test_keys_and_values_enter_the_cache_as_the_store_would_write_them(
    k_kind: str, v_kind: str, style: str
) -> None:
    torch.manual_seed(2)
    n_rows, positions, slots = 3, int32(0, 9, 70000), torch.tensor([5, 17, 99])
    qkv = torch.randn(n_rows, (GROUP + 2) * KV_HEADS, DIM)
    q, k, v = qkv.split([GROUP * KV_HEADS, KV_HEADS, KV_HEADS], 1)
    rope = Rope(DIM // 2, 5e5, style, magnitude=1.1)
    expected = [make_store(kind) for kind in (k_kind, v_kind)]
    rotation = Hadamard(DIM).reference([])
    q_expected, k_rotated = (rope.reference([x, positions]) for x in (q, k))
    if k_kind != "f16":
        q_expected, k_rotated = q_expected @ rotation, k_rotated @ rotation
    expected[0].write(HEADS, slots, k_rotated)
    expected[1].write(HEADS, slots, v @ rotation if v_kind != "f16" else v)

    stores = [make_store(kind) for kind in (k_kind, v_kind)]
    table = RopeTable(rope.frequencies(), rope.n_dims, style == "halves", rope.magnitude)
    out = rope_and_store(
        q, k, v, positions, slots.int(), table, *map(planes, stores), HEADS, torch.empty(q.shape),
        rotate_k=k_kind != "f16", rotate_v=v_kind != "f16",
    )  # fmt: skip
    assert torch.allclose(out, q_expected, atol=1e-4)
    for store, other in zip(stores, expected, strict=True):
        written = store.read(HEADS, slots)
        assert float((written - other.read(HEADS, slots)).norm() / written.norm()) < 2e-3
        elsewhere = torch.tensor([s for s in range(8 * BLOCK) if s not in slots])
        assert not store.read(slice(0, 3), elsewhere).any()


def test_norm_of_chosen_rows() -> None:
    x, weight = torch.randn(3, 96), torch.rand(96)
    out = rms_norm(x, weight, 1e-5, Rows.empty(PLAIN, 2, 96, "cpu"), int32(2, 0))
    assert torch.allclose(out.values, RmsNorm(1e-5).reference([x, weight])[[2, 0]], atol=1e-5)
    out = rms_norm(x, weight, 1e-5, Rows.empty(INT8, 3, 96, "cpu"))
    assert torch.allclose(out.unpack(), RmsNorm(1e-5).reference([x, weight]), atol=2e-2)


def test_norm_of_a_sum_stores_the_sum() -> None:
    x, more, weight, total = torch.randn(3, 96), torch.randn(3, 96), torch.rand(96), torch.empty(3, 96)
    expected = RmsNorm(1e-5).reference([x + more, weight])
    out = rms_norm(x, weight, 1e-5, Rows.empty(PLAIN, 3, 96, "cpu"), added=(more, total))
    assert torch.equal(total, x + more)
    torch.testing.assert_close(out.values, expected)
    router = torch.randn(5, 96)
    logits, normed, _, _ = norm_and_logits(x, router, weight, 1e-5, added=(more, total.zero_()))
    assert torch.equal(total, x + more)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(logits, expected @ router.T, atol=1e-4, rtol=1e-4)


def test_halves_of_a_norm_do_not_overflow() -> None:
    x, weight = torch.randn(2, 96), torch.full((96,), 60000.0)
    x[1] = 0
    x[1, 5] = 1e30  # the largest value that a norm has: sqrt(96) times the weight
    out = rms_norm(x, weight, 1e-5, Rows.empty(HALVES, 2, 96, "cpu", fixed=scale_of(96)))
    expected = RmsNorm(1e-5).reference([x, weight])
    assert expected.abs().max() > 65504
    assert torch.allclose(out.unpack(), expected, rtol=1e-3, atol=1.0)
    assert torch.equal(out.scale, torch.full((2,), out.fixed))
    assert [scale_of(n) for n in (1, 4, 5, 4096, 4097, 14336)] == [1, 2, 4, 64, 128, 128]


@pytest.mark.parametrize("function", ["silu", "gelu_tanh"])
def test_gate(function: str) -> None:
    x = torch.randn(2, 192)
    out = gated(x, function, Rows.empty(PLAIN, 2, 96, "cpu"))
    assert torch.allclose(out.values, Activation(function).reference([x[:, :96]]) * x[:, 96:], atol=1e-5)
