"""Attention of few queries over the packed, paged cache: softmax(scale · q·Kᵀ)·V, split over the context.

A program takes a bundle of rows (adjacent rows of one sequence: a token and its drafts; mostly a single row), one KV
head with the query heads that share it, up to `G` queries in all, and a share of the sequence's blocks; `combine` joins
the shares. So a context is read once for all rows of a bundle, as long as G suffices.
Unpacking bounds it, so as little as possible is done per code (`queries`, `tiles`).
Blocks of the next round are looked up a round ahead: the compiler then keeps several rounds' blocks under way, where
it would otherwise wait for the table, and then for the blocks. Base 2 throughout: the queries carry scale · log₂e.
Reference: graph.ops.Attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.bits import INTERPRETED
from motley.backends.cuda.kernels.overlap import let_next_start, overlapping, wait
from motley.backends.cuda.kernels.pipeline import has_large_memory, launch
from motley.backends.cuda.kernels.queries import (
    add_values,
    lift,
    load_queries,
    n_groups,
    n_queries,
    n_query_columns,
    query_rows,
    scores,
)
from motley.backends.cuda.kernels.seen_rows import depth, hides, load_seen
from motley.backends.cuda.kernels.tiles import (
    TILE,
    CachePlanes,
    dims,
    is_fast,
    is_plain,
    is_words,
    n_columns,
    n_parts,
    operand,
    tile_bytes,
    unit,
)
from motley.backends.cuda.support import CACHE_KINDS, refuses_cache

LOG2E = 1.4426950408889634
MAX_QUERIES = 16  # of a program: a tile of a tensor core
_LOWEST = tl.constexpr(-1e30)  # a peak where a row sees nothing of a share: its bundle does


@triton.constexpr_function
def _n_blocks(k_kind, v_kind, n_tiles, block_size):
    """Blocks of a round: two where a warp would copy less than two runs of a tile's words, and registers suffice."""
    is_small = block_size <= 32 and n_tiles <= 4 and is_fast(k_kind) and is_fast(v_kind)
    return 2 if is_small and "q4_0" in (k_kind, v_kind) else 1


@triton.jit
def look_up(tables, b, end, N: tl.constexpr):
    """The ids of blocks b … b + N of a table; the last one again where there are no more."""
    ids = ()
    for i in tl.static_range(N):
        ids = ids + (tl.load(tables + tl.minimum(b + i, end - 1)),)  # type: ignore[assignment]
    return ids


@triton.jit
def with_sink(total, peak, sink):
    """A softmax with one more score, which has no value: the factor of all values, and the new sum.

    `peak` is in base 2, `sink` is not.
    """
    own = sink * 1.4426950408889634
    top = tl.maximum(peak, own)
    rescale = tl.exp2(peak - top)
    return rescale, total * rescale + tl.exp2(own - top)


# Triton would compile one variant for each layer that starts at a multiple of 16 head rows, and one for the others.
@triton.jit(
    do_not_specialize=[
        "table_stride",
        "head_rows",
        "first_row",
        "window",
        "n_splits",
        "min_blocks",
        "n_chunks",
    ]
)
def _attend(
    q, keys, values, tables, bundle_table, bundle_position, bundle_row, bundle_count, seen_rows, firsts,
    out, peaks, sums, table_stride, head_rows, first_row, window, factor, n_splits, min_blocks, n_chunks,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BS: tl.constexpr,
    BUNDLED: tl.constexpr, G: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    let_next_start()
    bundle, head, split = tl.program_id(2), tl.program_id(0) // n_chunks, tl.program_id(1)
    done = tl.program_id(0) % n_chunks * G  # queries of the bundle that other programs take
    row, count = bundle, 1
    if BUNDLED:
        row, count = tl.load(bundle_row + bundle), tl.load(bundle_count + bundle)
    n = tl.minimum(count * GROUP - done, G)
    table, position = tl.load(bundle_table + bundle), tl.load(bundle_position + bundle)
    first = tl.load(firsts + table)  # the position that the table starts with
    lowest, highest = tl.maximum(position - window + 1, first), position + count - 1  # of the whole bundle
    start, stop = (lowest - first) // BS, (highest - first) // BS + 1  # blocks of the table
    share = tl.maximum(tl.cdiv(stop - start, n_splits), min_blocks)
    begin, end = start + split * share, tl.minimum(start + (split + 1) * share, stop)
    TILES: tl.constexpr = (DIM + 31) // 32
    N: tl.constexpr = _n_blocks(K_KIND, V_KIND, TILES, BS)
    tables += table * table_stride
    blocks = look_up(tables, begin, tl.maximum(end, 1), N)  # a row without context has a table all the same
    wait()  # tables are there before the first kernel of a batch starts; queries, keys and values are not
    if (begin >= end) | (n <= 0):
        return
    GROUPS: tl.constexpr = n_groups(K_KIND, TILES, G, BUNDLED)
    GP: tl.constexpr = n_queries(K_KIND, TILES, G, BUNDLED)
    NP: tl.constexpr = n_query_columns(GP)
    LIFT: tl.constexpr = lift(K_KIND, TILES, BUNDLED)
    T: tl.constexpr = N * BS
    W: tl.constexpr = n_columns(V_KIND, TILES)
    n_heads = tl.num_programs(0) // n_chunks * GROUP
    r = row * n_heads + head * GROUP
    queries, zero = load_queries(
        q, r, done, n, n_heads, factor, K_KIND, DIM, TILES, GROUPS, GP, GROUP, BUNDLED
    )
    acc, surplus = (), tl.zeros([W, NP], tl.float32)
    for i in tl.static_range(n_parts(V_KIND)):
        acc = acc + (tl.zeros([W, NP], tl.float32),)  # type: ignore[assignment]
    peak, total = tl.full([NP], -float("inf"), tl.float32), tl.zeros([NP, T], tl.float32)
    last = tl.minimum(highest, first + end * BS - 1) - lowest
    own, low, high = n, n, n
    if BUNDLED:
        number = (done + tl.arange(0, NP) % GP) // GROUP
        low, high = load_seen(seen_rows, row + number, number < count)
        own = position - lowest + depth(low, high)  # where each query is
    for b in range(begin, end, N):
        at = ()
        for i in tl.static_range(N):
            at = at + (blocks[i].to(tl.int64) * head_rows + first_row + head,)  # type: ignore[assignment]
        blocks = look_up(tables, b + N, end, N)
        s = scores(queries, zero, keys, at, K_KIND, TILES, BS, GROUPS, GP, NP, BUNDLED, PLAIN)
        key = (first - lowest + b * BS + tl.arange(0, T)).to(tl.uint32)  # one comparison for both ends
        seen = key <= last.to(tl.uint32)
        if not BUNDLED:
            s = tl.where(seen[None, :], s, -float("inf"))
            top = tl.maximum(peak, tl.max(s, 1))
        else:
            ago = own[:, None] - key.to(tl.int32)[None, :]
            s = tl.where(seen[None, :] & (ago < window), s, -float("inf"))
            if first + (b + N) * BS > position:  # the bundle's own keys
                key_row = first - position + b * BS + tl.arange(0, T)
                of_key = load_seen(seen_rows, row + key_row, (key_row >= 0) & (key_row < count))
                key_depth = depth(of_key[0], of_key[1])[None, :]
                is_hidden = hides(low[:, None], high[:, None], key_row[None, :], key_depth, window)
                s = tl.where(is_hidden, -float("inf"), s)
            top = tl.maximum(tl.maximum(peak, tl.max(s, 1)), _LOWEST)
        rescale = tl.exp2((peak - top) * LIFT)
        p = tl.exp2(s * LIFT - (top * LIFT)[:, None])
        total = total * rescale[:, None] + p
        peak = top
        p = tl.trans(p).to(operand(V_KIND))
        acc, surplus = add_values(acc, surplus, p, rescale, values, at, seen, V_KIND, TILES, BS, PLAIN)
    g, w = tl.arange(0, NP), tl.arange(0, W)[:, None]
    place = query_rows(r, done + g, n_heads, GROUP, BUNDLED) * n_splits + split
    for i in tl.static_range(n_parts(V_KIND)):
        v = acc[i]  # type: ignore[var-annotated]
        if is_words(V_KIND):
            v = v * (8.0 / unit(i, V_KIND)) - surplus * 8.0
        d = dims(w, i, V_KIND)
        tl.store(out + place[None, :].to(tl.int64) * DIM + d, v, (g < n)[None, :] & (d < DIM))
    tl.store(peaks + place, peak * LIFT, g < n)
    tl.store(sums + place, tl.sum(total, 1), g < n)


@dataclass(frozen=True, eq=False)
class Tables:
    """The places of the contexts of bundles. All int32, on the device; data, not shape."""

    blocks: torch.Tensor  # (tables, most blocks): of each sequence
    firsts: torch.Tensor  # (tables,): the position that the table starts with
    table: torch.Tensor  # (bundles,): which table
    position: torch.Tensor  # (bundles,): of the first row
    most_rows: int = 1  # of a bundle; 1: bundle i is row i
    row: torch.Tensor | None = None  # (bundles,): the first row, where a bundle may have several
    count: torch.Tensor | None = None  # (bundles,): its rows
    seen: torch.Tensor | None = None  # (rows, 2): which rows of its bundle each row sees (`seen_rows`)

    @property
    def rows_and_counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For kernels, which do not read them of single rows."""
        if self.row is None or self.count is None:
            return self.table, self.table
        return self.row, self.count

    @property
    def masks(self) -> torch.Tensor:
        """`seen`, for kernels, which do not read it of single rows."""
        assert self.seen is not None or self.most_rows == 1
        return self.table if self.seen is None else self.seen


@dataclass(frozen=True)
class Tuning:
    """How the kernel is launched: programs in all, registers of a thread where the compiler would take more."""

    n_programs: int
    registers: int | None = None
    stages: int | None = None  # None: `_stages`
    warps: int = 1
    max_queries: int = MAX_QUERIES  # of a program; more that share a KV head are other programs'

    def n_splits(self, n_bundles: int, n_queries: int, n_kv_heads: int) -> int:
        """`n_queries`: of a bundle and a KV head."""
        n_programs = n_bundles * n_kv_heads * -(-n_queries // self.max_queries)
        return max(1, self.n_programs // max(1, n_programs))


# For each of an H200's 132 multiprocessors, seven programs of q8_0 and nearly eight of q4_0, as many as have room; of
# float16 six, where there is room for four: those that are done early leave theirs to another. Measured with
# benchmarks/cuda_model.py. Values that are unpacked one by one are not worth the memory of a pipeline.
TUNINGS = {kind: Tuning(512) if is_plain(kind) else Tuning(512, stages=1, warps=4) for kind in CACHE_KINDS}
TUNINGS |= {"f16": Tuning(792), "bf16": Tuning(792), "q8_0": Tuning(924), "q4_0": Tuning(1040, stages=3)}


def tuning_of(k_kind: str, v_kind: str) -> Tuning:
    return TUNINGS[v_kind if is_fast(k_kind) else k_kind]


def _stages(k_kind: str, v_kind: str, n_tiles: int, block_size: int) -> int:
    """Four if a program then takes at most a sixth of a multiprocessor's shared memory, where that is 227 KiB.

    Measured on an H200. Not only the depth matters: kernels that start early (`overlap`) find multiprocessors unequally
    occupied, and could put eight programs on one and none on another. Larger programs are spread out.
    """
    n_tokens = block_size * _n_blocks(k_kind, v_kind, n_tiles, block_size)
    n_bytes = (tile_bytes(k_kind) + tile_bytes(v_kind)) * n_tiles * n_tokens
    is_small = n_tiles <= 4 and 4 * n_bytes <= 36 << 10
    return 4 if is_small and has_large_memory() else 3


@dataclass(frozen=True, eq=False)
class Shares:
    """The programs' results for `combine`: for each row, head and split."""

    values: torch.Tensor  # float32 (rows, heads, splits, dim)
    peaks: torch.Tensor  # float32 (rows, heads, splits)
    sums: torch.Tensor  # float32 (rows, heads, splits)
    min_blocks: int  # that a split takes, so that short contexts are not cut up

    @staticmethod
    def empty(
        n_rows: int, n_heads: int, n_splits: int, dim: int, device: torch.device | str, min_blocks: int = 4
    ) -> Shares:
        values = torch.empty(n_rows, n_heads, n_splits, dim, device=device)
        peaks, sums = (torch.empty(n_rows, n_heads, n_splits, device=device) for _ in range(2))
        return Shares(values, peaks, sums, min_blocks)


def attend(
    q: torch.Tensor,
    keys: CachePlanes,
    values: CachePlanes,
    head_rows: slice,
    tables: Tables,
    out: Shares,
    *,
    scale: float,
    window: int | None = None,
    tuning: Tuning | None = None,
) -> Shares:
    """q (rows, heads, dim) float32 over the KV heads `head_rows` of the cache → shares."""
    _, n_heads, dim = q.shape
    n_kv_heads, block_size = head_rows.stop - head_rows.start, keys.block_size
    group = n_heads // n_kv_heads
    reason = refuses_cache(keys.kind, values.kind, block_size)
    assert reason is None, reason
    assert keys.n_tiles == values.n_tiles == triton.cdiv(dim, TILE)
    assert q.dtype == torch.float32
    assert q.is_contiguous()
    n_splits, most_rows = out.peaks.shape[2], tables.most_rows
    tuning = tuning or tuning_of(keys.kind, values.kind)
    n_chunks = triton.cdiv(most_rows * group, tuning.max_queries)
    stages = tuning.stages or _stages(keys.kind, values.kind, keys.n_tiles, block_size)
    limits = {} if tuning.registers is None else {"maxnreg": tuning.registers}
    launch(
        _attend[(n_kv_heads * n_chunks, n_splits, len(tables.table))],
        q, keys.pointers, values.pointers,
        tables.blocks, tables.table, tables.position, *tables.rows_and_counts, tables.masks, tables.firsts,
        out.values, out.peaks, out.sums, tables.blocks.shape[1], keys.codes.shape[1], head_rows.start,
        window or 2**30, scale * LOG2E, n_splits, out.min_blocks, n_chunks,
        K_KIND=keys.kind, V_KIND=values.kind, GROUP=group, DIM=dim, BS=block_size, BUNDLED=most_rows > 1,
        G=tuning.max_queries if most_rows > 1 else min(group, tuning.max_queries), PLAIN=INTERPRETED,
        num_warps=tuning.warps, num_stages=stages, **limits, **overlapping(),
    )  # fmt: skip
    return out
