"""Every type of cache, and head dims of all kinds, under Triton's interpreter against the store's own arithmetic."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from motley.backends.cuda.kernels.attention import Shares, Tables, attend
from motley.backends.cuda.kernels.combine import combine
from motley.backends.cuda.kernels.rope_and_store import RopeTable, rope_and_store
from motley.backends.cuda.kernels.rows import INT8, PLAIN, Rows
from motley.backends.cuda.kernels.tiles import CachePlanes
from motley.backends.cuda.support import refuses_cache
from motley.graph.ops import Hadamard, Rope
from motley.kvcache.store import Store
from motley.kvcache.types import CACHE_TYPES, get_cache_type

pytestmark = pytest.mark.slow  # interpreted kernels: run them after a change of kernels

BLOCK, N_BLOCKS, KV_HEADS = 16, 4, 2
HEADS = slice(1, 1 + KV_HEADS)  # of three rows in the stores
PAIRS = [
    ("bf16", "bf16", 64, 4),
    ("f32", "q5_0", 32, 1),
    ("q5_1", "q4_1", 64, 4),
    ("iq4_nl", "q4_0", 80, 2),
    ("q4_0", "iq4_nl", 96, 3),
    ("q8_0", "q8_0", 32, 17),
    ("q4_0", "q8_0", 16, 5),
    ("q4_0", "q4_0", 256, 2),
    ("q8_0", "f16", 24, 1),  # rows of 48 values
]


def planes(store: Store) -> CachePlanes:
    return CachePlanes.of(store.kind.name, store.planes)


def make_store(kind: str, dim: int) -> Store:
    return Store(get_cache_type(kind), n_blocks=N_BLOCKS, block_size=BLOCK, n_rows=3, head_dim=dim)


def filled(kind: str, dim: int) -> Store:
    store = make_store(kind, dim)
    store.write(HEADS, torch.arange(N_BLOCKS * BLOCK), torch.randn(N_BLOCKS * BLOCK, KV_HEADS, dim))
    return store


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


@pytest.mark.parametrize(("k_kind", "v_kind", "dim", "group"), PAIRS)
def test_decode_attention(k_kind: str, v_kind: str, dim: int, group: int) -> None:
    torch.manual_seed(dim)
    stores = filled(k_kind, dim), filled(v_kind, dim)
    blocks, n_context = [2, 0, 3], 2 * BLOCK + 5
    slots = (torch.tensor(blocks)[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:n_context]
    k, v = (store.read(HEADS, slots).repeat_interleave(group, 1) for store in stores)
    q = torch.randn(1, KV_HEADS * group, dim)
    weights = torch.softmax(torch.einsum("qhd,thd->qht", q, k) * 0.2, -1)
    expected = torch.einsum("qht,thd->qhd", weights, v)

    zero = torch.zeros(1, dtype=torch.int32)
    tables = Tables(torch.tensor([blocks], dtype=torch.int32), zero, zero, zero + n_context - 1)
    shares = Shares.empty(1, q.shape[1], 2, dim, "cpu", min_blocks=1)
    attend(q, *map(planes, stores), HEADS, tables, shares, scale=0.2)
    out = combine(shares, tables, BLOCK, Rows.empty(PLAIN, 1, q[0].numel(), "cpu"), rotate=False)
    assert error(out.values.view(q.shape), expected) < 2e-3


def test_heads_that_do_not_fill_blocks_of_32_are_joined_as_int8() -> None:
    torch.manual_seed(3)
    values = torch.randn(1, 4, 1, 80)
    shares = Shares(values, torch.zeros(1, 4, 1), torch.full((1, 4, 1), 2.0), 1)
    zero = torch.zeros(1, dtype=torch.int32)
    tables = Tables(torch.zeros(1, 1, dtype=torch.int32), zero, zero, zero)
    out = combine(shares, tables, BLOCK, Rows.empty(INT8, 1, 320, "cpu"), rotate=False)
    assert error(out.unpack(), values.reshape(1, -1) / 2) < 1e-2


@pytest.mark.parametrize(
    ("kind", "dim"), [(kind, 64) for kind in CACHE_TYPES] + [("q5_1", 80), ("iq4_nl", 16)]
)
def test_heads_are_stored_as_the_store_would(kind: str, dim: int) -> None:
    torch.manual_seed(dim)
    slots, positions = torch.tensor([5, 33]), torch.zeros(2, dtype=torch.int32)
    q, k, v = (torch.randn(2, KV_HEADS, dim) for _ in range(3))
    expected, stores = [make_store(kind, dim) for _ in range(2)], [make_store(kind, dim) for _ in range(2)]
    for store, x in zip(expected, (k, v), strict=True):
        store.write(HEADS, slots, x)
    rope = Rope(dim, 1e4, "halves")
    table = RopeTable(rope.frequencies(), dim, True, 1.0)
    out = rope_and_store(
        q, k, v, positions, slots.int(), table, *map(planes, stores), HEADS, torch.empty(q.shape),
        rotate_k=False, rotate_v=False,
    )  # fmt: skip
    assert torch.allclose(out, q, atol=1e-6)
    for store, other in zip(stores, expected, strict=True):
        read = store.read(slice(0, 3), torch.arange(N_BLOCKS * BLOCK))
        wanted = other.read(slice(0, 3), torch.arange(N_BLOCKS * BLOCK))
        tolerance = 8e-3 if kind == "bf16" else 1e-3  # the interpreter cuts off where a GPU rounds
        # A value on the border of two codes may fall to either side.
        assert ((read - wanted).abs() > tolerance * wanted.abs()).float().mean() < 1e-3


def test_heads_of_three_tiles_are_rotated_tile_by_tile() -> None:
    torch.manual_seed(4)
    dim, rotation = 96, Hadamard(32).reference([])
    slots, positions = torch.tensor([7]), torch.zeros(1, dtype=torch.int32)
    q, k, v = (torch.randn(1, KV_HEADS, dim) for _ in range(3))
    stores = [make_store("q8_0", dim) for _ in range(2)]
    table = RopeTable(Rope(dim, 1e4, "halves").frequencies(), dim, True, 1.0)
    out = rope_and_store(
        q, k, v, positions, slots.int(), table, *map(planes, stores), HEADS, torch.empty(q.shape),
        rotate_k=True, rotate_v=True, rotation=32,
    )  # fmt: skip
    q_rotated, k_rotated, v_rotated = ((x.unflatten(-1, (3, 32)) @ rotation).flatten(-2) for x in (q, k, v))
    assert torch.allclose(out, q_rotated, atol=1e-5)
    for store, expected in zip(stores, (k_rotated, v_rotated), strict=True):
        assert error(store.read(HEADS, slots), expected) < 1e-2
    shares = Shares(v_rotated.unsqueeze(2), torch.zeros(1, 2, 1), torch.ones(1, 2, 1), 1)
    tables = Tables(positions[None], positions, positions, positions)
    rows = Rows.empty(PLAIN, 1, 2 * dim, "cpu")
    back = combine(shares, tables, BLOCK, rows, rotate=True, rotation=32).values.view(v.shape)
    assert torch.allclose(back, v, atol=1e-5)


def test_every_pair_of_types_is_supported() -> None:
    assert all(refuses_cache(k, v, 16) is None for k in CACHE_TYPES for v in CACHE_TYPES)
    assert refuses_cache("q4_0", "q3_0", 16) == "no kernel for a cache of q3_0"
    assert refuses_cache("f16", "f16", 24)
