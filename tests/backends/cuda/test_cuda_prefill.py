"""Attention of many rows over the cache, under Triton's interpreter, against the op's reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from motley.backends.cuda import library_attention
from motley.backends.cuda.kernels.prefill import prefill, span_rows, spans
from motley.backends.cuda.kernels.tiles import CachePlanes
from motley.backends.cuda.staging import Chunk
from motley.graph.ops import Attention, Hadamard
from motley.kvcache.arena import ArenaLayer, GroupBatch, SequenceTable
from motley.kvcache.store import Store
from motley.kvcache.types import get_cache_type

pytestmark = pytest.mark.slow  # interpreted kernels: run them after a change of kernels

KV_HEADS, N_BLOCKS = 2, 12
HEADS = slice(1, 1 + KV_HEADS)  # of three rows in the stores
CASES = [  # types of K and V, dim, heads that share a KV head, tokens of a block, window
    ("f16", "f16", 64, 3, 16, None),
    ("q8_0", "q8_0", 64, 1, 32, None),
    ("q4_0", "q4_0", 128, 2, 32, None),
    ("q4_0", "q4_0", 32, 1, 16, 11),
    ("q8_0", "q4_0", 96, 1, 16, 20),
    ("bf16", "q5_1", 80, 2, 16, None),
    ("iq4_nl", "f32", 24, 1, 64, 5),
]


def filled(kind: str, dim: int, block_size: int) -> Store:
    """Whatever was stored before lies in slots that are not written: what is worst is not a number."""
    store = Store(get_cache_type(kind), n_blocks=N_BLOCKS, block_size=block_size, n_rows=3, head_dim=dim)
    for name, plane in store.planes.items():
        if plane.is_floating_point() and name != "codes":
            plane.fill_(float("nan"))
    return store


def planes(store: Store) -> CachePlanes:
    return CachePlanes.of(store.kind.name, store.planes)


def flat_tables(tables: list[SequenceTable]) -> tuple[torch.Tensor, list[int]]:
    """As `staging` writes them, and where each begins."""
    pieces = [np.array([table.first, *table.blocks], np.int32) for table in tables]
    starts = np.cumsum([7, *map(len, pieces)])
    return torch.from_numpy(np.concatenate([np.zeros(7, np.int32), *pieces])), starts[:-1].tolist()


@pytest.mark.parametrize(("k_kind", "v_kind", "dim", "group", "size", "window"), CASES)
def test_rows_of_several_sequences(
    k_kind: str, v_kind: str, dim: int, group: int, size: int, window: int | None
) -> None:
    torch.manual_seed(dim + size)
    stores = filled(k_kind, dim, size), filled(v_kind, dim, size)
    free = iter(np.random.default_rng(dim).permutation(N_BLOCKS).astype(np.int32))
    tables, row = [], 1  # row 0 is none of theirs
    for n_rows, n_before, n_holes in ((19, 0, 0), (5, 2 * size + 3, 1), (2, 14, 0)):
        first = n_holes * size if window is not None and window < size else 0
        n_blocks = -(-(n_before + n_rows - first) // size)
        blocks = np.array([next(free) for _ in range(n_blocks)], np.int32)
        tables.append(SequenceTable(row, n_rows, n_before, first, blocks))
        row += n_rows
    for table in tables:
        slots = table.slots(size)
        for store in stores:
            store.write(HEADS, slots, torch.randn(len(slots), KV_HEADS, dim))
    q = torch.randn(row, KV_HEADS * group, dim)
    layer = ArenaLayer(*stores, HEADS, 0).on(GroupBatch.of(tables, size))
    expected = Attention(0.2, window).reference([q, layer])

    numbers, starts = flat_tables(tables)
    max_rows = span_rows(16, 128)  # so that a sequence has more than one
    portions = [
        spans(t.first_row, t.n_rows, t.position, at, max_rows) for t, at in zip(tables, starts, strict=True)
    ]
    out = torch.full_like(q, 7.0)
    prefill(
        q, *map(planes, stores), HEADS, numbers, torch.from_numpy(np.concatenate(portions)), out,
        span_rows=max_rows, scale=0.2, window=window,
    )  # fmt: skip
    assert (out[0] == 7).all()
    assert float((out[1:] - expected[1:]).norm() / expected[1:].norm()) < 2e-3

    sinks = torch.linspace(-8, 12, KV_HEADS * group)
    expected = Attention(0.2, window).reference([q, layer, sinks])
    prefill(
        q, *map(planes, stores), HEADS, numbers, torch.from_numpy(np.concatenate(portions)), out,
        span_rows=max_rows, scale=0.2, window=window, sinks=sinks,
    )  # fmt: skip
    assert float((out[1:] - expected[1:]).norm() / expected[1:].norm()) < 2e-3


@pytest.mark.parametrize(("kind", "dim", "rotation"), [("q8_0", 64, 64), ("q4_0", 64, 64), ("q4_0", 96, 32)])
def test_values_are_rotated_back(kind: str, dim: int, rotation: int) -> None:
    torch.manual_seed(dim)
    stores = filled(kind, dim, 16), filled(kind, dim, 16)
    table = SequenceTable(0, 20, 0, 0, np.array([3, 1], np.int32))
    matrix = Hadamard(rotation).reference([])
    q, k, v = (torch.randn(20, KV_HEADS, dim) for _ in range(3))
    for store, x in zip(stores, (k, v), strict=True):
        store.write(HEADS, table.slots(16), x)
    layer = ArenaLayer(*stores, HEADS, 0).on(GroupBatch.of([table], 16))
    expected = Attention(0.2).reference([q, layer])
    expected = (expected.unflatten(-1, (-1, rotation)) @ matrix).flatten(-2)
    numbers, (start,) = flat_tables([table])
    out = torch.empty_like(q)
    portions = torch.from_numpy(spans(0, 20, 0, start, 32))
    prefill(
        q,
        *map(planes, stores),
        HEADS,
        numbers,
        portions,
        out,
        span_rows=32,
        scale=0.2,
        rotate=True,
        rotation=rotation,
    )
    assert float((out - expected).norm() / expected.norm()) < 2e-3


def test_spans_cover_each_row_once_and_the_longest_come_first() -> None:
    portions = spans(10, 300, 40, 77, 128)
    assert portions.tolist() == [[266, 44, 296, 77], [138, 128, 168, 77], [10, 128, 40, 77]]
    assert [span_rows(n, 64) for n in (2, 17, 100, 5000)] == [16, 64, 64, 64]


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What cuDNN does: float16 (1, heads, tokens, dim) with fewer KV heads, and the logarithms of sums."""
    assert {q.dtype, k.dtype, v.dtype} == {torch.float16}
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q.float() @ k.mT * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    out = (torch.softmax(scores, -1) @ v).half()
    rows = out.transpose(1, 2).contiguous().transpose(1, 2)  # as it is given, row by row
    return rows, torch.logsumexp(scores, -1, keepdim=True)


@pytest.mark.parametrize(("kind", "group", "rotation"), [("f16", 3, 1), ("q8_0", 2, 64), ("q4_0", 4, 32)])
@pytest.mark.parametrize("with_own", [False, True])
def test_long_contexts_are_joined_from_pieces(
    kind: str, group: int, rotation: int, with_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of 64, 32 and 16 tokens by the library, and the rest, which ends within a block, by `prefill`; or no rest,
    and the rows' own keys by the library, too.
    """
    torch.manual_seed(rotation)
    monkeypatch.setattr(library_attention, "PIECE_SIZES", (64, 32, 16))
    monkeypatch.setattr(library_attention, "_ROWS", 8)
    monkeypatch.setattr(library_attention, "library_attention", plain_attention)
    dim, n_rows, n_before = (64, 16, 112) if with_own else (64, 5, 115)
    stores = filled(kind, dim, 16), filled(kind, dim, 16)
    blocks = np.random.default_rng(1).permutation(N_BLOCKS).astype(np.int32)[:8]
    table = SequenceTable(0, n_rows, n_before, 0, blocks)
    for store in stores:
        store.write(HEADS, table.slots(16), torch.randn(n_before + n_rows, KV_HEADS, dim))
    q = torch.randn(n_rows, KV_HEADS * group, dim) * 3
    layer = ArenaLayer(*stores, HEADS, 0).on(GroupBatch.of([table], 16))
    expected = Attention(0.2).reference([q, layer])
    if rotation > 1:
        matrix = Hadamard(rotation).reference([])
        expected = (expected.unflatten(-1, (-1, rotation)) @ matrix).flatten(-2)
    assert list(library_attention.pieces(112)) == [(0, 64), (64, 32), (96, 16)]
    numbers, (start,) = flat_tables([table])
    out = torch.full_like(q, torch.nan)
    portions = torch.from_numpy(spans(0, n_rows, n_before, start, 16))
    caches = *map(planes, stores), HEADS
    sums = torch.full(q.shape[:2], torch.nan)
    if not with_own:
        sums = prefill(
            q, *caches, numbers, portions, out,
            span_rows=16, scale=0.2, rotate=rotation > 1, rotation=rotation, n_skipped=112,
        )  # fmt: skip
    library_attention.attend_pieces(
        q, *caches, numbers[start + 1 :], 112, out, sums, scale=0.2, rotation=rotation, with_own=with_own
    )
    assert float((out - expected).norm() / expected.norm()) < 2e-3


def test_only_long_contexts_of_many_rows_are_taken_in_pieces() -> None:
    def taken(n_rows: int, position: int, first: int = 0) -> int:
        return library_attention.n_taken(Chunk(0, n_rows, position, first, 0, 1))

    assert [taken(512, n) for n in (0, 4095, 4096, 6143, 6144, 40_000)] == [0, 0, 4096, 4096, 6144, 38_912]
    own = [
        library_attention.takes_own(Chunk(0, n, p, 0, 0, 1))
        for n, p in ((2048, 4096), (2048, 4100), (512, 4096))
    ]
    assert own == [True, False, False]
    assert not library_attention.takes_own(Chunk(0, 2048, 0, 0, 0, 1))
    assert taken(511, 8192) == 0
    assert taken(512, 8192, first=2048) == 0  # a window's table
    assert sum(n for _, n in library_attention.pieces(38_912)) == 38_912
    assert list(library_attention.pieces(0)) == []
