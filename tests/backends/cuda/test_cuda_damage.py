"""What is no number stays none, and what is large stays finite, under Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from motley.backends.cuda.kernels.attention import Shares, Tables, attend
from motley.backends.cuda.kernels.combine import combine
from motley.backends.cuda.kernels.prefill import prefill, span_rows, spans
from motley.backends.cuda.kernels.rope_and_store import RopeTable, rope_and_store
from motley.backends.cuda.kernels.rows import HALVES, INT8, PLAIN, Rows, convert
from motley.backends.cuda.kernels.tiles import CachePlanes
from motley.graph.ops import Rope
from motley.kvcache.store import Store
from motley.kvcache.types import CACHE_TYPES, get_cache_type

pytestmark = pytest.mark.slow  # interpreted kernels: run them after a change of kernels

BLOCK, DIM = 16, 64
HEADS = slice(0, 1)
DAMAGE = [float("nan"), float("inf"), -float("inf")]


def make_store(kind: str) -> Store:
    return Store(get_cache_type(kind), n_blocks=2, block_size=BLOCK, n_rows=1, head_dim=DIM)


def planes(store: Store) -> CachePlanes:
    return CachePlanes.of(store.kind.name, store.planes)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("form", [INT8, HALVES, PLAIN])
def test_rows_keep_what_is_no_number(form: str, damage: float) -> None:
    x = torch.randn(2, 128)
    x[1, 40] = damage
    found = convert(x, Rows.empty(form, 2, 128, "cpu")).unpack()
    assert found[0].isfinite().all()
    assert not found[1, 40].isfinite()
    if form == INT8:  # a block has one scale: each product with it is NaN
        assert found[1, 32:64].isnan().all()
        assert found[1, :32].isfinite().all()


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_a_store_keeps_what_is_no_number(kind: str, damage: float) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 1, DIM) for _ in range(3))
    v[0, 0, 40] = damage
    stores = [make_store(kind) for _ in range(2)]
    zero, slot = torch.zeros(1, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    table = RopeTable(Rope(DIM, 1e4, "halves").frequencies(), DIM, True, 1.0)
    rope_and_store(
        q, k, v, zero, slot, table, *map(planes, stores), HEADS, torch.empty(q.shape),
        rotate_k=False, rotate_v=False,
    )  # fmt: skip
    keys, values = (store.read(HEADS, slot.long())[0, 0] for store in stores)
    assert keys.isfinite().all()
    assert values[:32].isfinite().all()
    assert not values[40].isfinite()
    if kind not in ("f32", "f16", "bf16"):
        assert values[32:].isnan().all()


@pytest.mark.parametrize("damaged", ["keys", "values"])
@pytest.mark.parametrize("kind", CACHE_TYPES)
def test_attention_over_damage_is_nan(kind: str, damaged: str) -> None:
    torch.manual_seed(2)
    stores = {"keys": make_store(kind), "values": make_store(kind)}
    for store in stores.values():
        store.write(HEADS, torch.arange(2 * BLOCK), torch.randn(2 * BLOCK, 1, DIM))
    stores[damaged].write(HEADS, torch.tensor([20]), torch.full((1, 1, DIM), float("nan")))
    assert decode(stores, torch.randn(1, 1, DIM), 30).isnan().all()
    assert decode(stores, torch.randn(1, 1, DIM), 16).isfinite().all()  # which ends before it
    rows = in_rows(stores, torch.randn(30, 1, DIM))
    assert rows[20:].isnan().all()
    if damaged == "keys":
        assert rows[:20].isfinite().all()  # of values, rows of one span share the product with each


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_values_beyond_float16_are_attended(kind: str) -> None:
    torch.manual_seed(3)
    stores = {"keys": make_store(kind), "values": make_store(kind)}
    for store, size in zip(stores.values(), (1e6, 1e8), strict=True):
        store.write(HEADS, torch.arange(2 * BLOCK), size * torch.randn(2 * BLOCK, 1, DIM))
    q = 1e-6 * torch.randn(30, 1, DIM)
    k, v = (store.read(HEADS, torch.arange(30)).squeeze(1) for store in stores.values())
    hidden = torch.ones(30, 30).triu(1).bool()
    scores = (0.2 * q.squeeze(1) @ k.T).masked_fill(hidden, -torch.inf)
    expected = (torch.softmax(scores, -1) @ v).unsqueeze(1)
    assert expected.abs().max() > 65504
    torch.testing.assert_close(in_rows(stores, q), expected, rtol=2e-3, atol=2e5)
    torch.testing.assert_close(decode(stores, q[29:], 30), expected[29:], rtol=2e-3, atol=2e5)


def decode(stores: dict[str, Store], q: torch.Tensor, n_context: int) -> torch.Tensor:
    zero = torch.zeros(1, dtype=torch.int32)
    tables = Tables(torch.tensor([[0, 1]], dtype=torch.int32), zero, zero, zero + n_context - 1)
    shares = Shares.empty(1, 1, 2, DIM, "cpu", min_blocks=1)
    attend(q, planes(stores["keys"]), planes(stores["values"]), HEADS, tables, shares, scale=0.2)
    return combine(shares, tables, BLOCK, Rows.empty(PLAIN, 1, DIM, "cpu"), rotate=False).values.view(q.shape)


def in_rows(stores: dict[str, Store], q: torch.Tensor) -> torch.Tensor:
    n_rows, size, out = len(q), span_rows(len(q), 128), torch.empty_like(q)
    numbers = torch.from_numpy(np.array([0, 0, 1], np.int32))
    portions = torch.from_numpy(np.ascontiguousarray(spans(0, n_rows, 0, 0, size)))
    prefill(
        q, planes(stores["keys"]), planes(stores["values"]), HEADS, numbers, portions, out,
        span_rows=size, scale=0.2,
    )  # fmt: skip
    return out
