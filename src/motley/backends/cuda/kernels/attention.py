"""Attention of single queries over the packed, paged cache: softmax(scale · q·Kᵀ)·V, split over the context.

A program takes one query row, one KV head with the `G` query heads that share it and a share of the row's blocks;
`combine` joins the shares. Unpacking bounds it, so as little as possible is done per code (see `tiles`):

    scores   rows of the product are (tile of 32 dims, query): a query's row is zero outside of its tile. So scores
             come apart by tile, K's codes enter as they are, and K's scales multiply (tile, query, token) sums.
    values   columns of the product are queries, so that sixteen rows of a tensor core's tile are all dims. The zero
             codes' share is one more product, of what all codes have too much, and is subtracted at the end.

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
from motley.backends.cuda.kernels.pipeline import launch
from motley.backends.cuda.kernels.tiles import (
    TILE,
    CachePlanes,
    bias_of,
    dims,
    exact_parts,
    is_fast,
    is_words,
    load_columns,
    load_scales,
    n_columns,
    n_parts,
    operand,
    scaled_parts,
    spread,
    unit,
    zero_code,
)
from motley.formats import QUANTIZERS

LOG2E = 1.4426950408889634
KINDS = ("f32", "f16", "bf16", *(name.lower() for name in QUANTIZERS))
MOST_QUERIES = 16  # of a program; more that share a KV head are other programs'


@triton.constexpr_function
def _n_groups(kind, n_tiles, group):
    """Groups of rows in the product of scores: one for each tile; of plain values what fills a tensor core's tile."""
    if is_words(kind):
        return n_columns(kind, n_tiles) * n_parts(kind) // 32
    return max(1, 16 // max(8, triton.next_power_of_2(group)))


@triton.constexpr_function
def _n_queries(kind, n_tiles, group):
    """Rows of a group: the queries, padded."""
    return max(triton.next_power_of_2(group), 16 // _n_groups(kind, n_tiles, group))


@triton.constexpr_function
def _n_query_columns(n_queries):
    return max(8, n_queries)


@triton.constexpr_function
def _lift(kind):
    """Codes enter as subnormal numbers."""
    return 2.0**24 if is_words(kind) else 1.0


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
def _load_queries(
    q, r, n, factor, KIND: tl.constexpr, DIM: tl.constexpr, TILES: tl.constexpr, GROUPS: tl.constexpr,
    GP: tl.constexpr,
):  # fmt: skip
    """For each part of K an operand (GROUPS · GP, columns), and what the zero codes add to each row's sum.

    The first `n` queries from row r of q.
    """
    W: tl.constexpr = n_columns(KIND, TILES)
    row, w = tl.arange(0, GROUPS * GP), tl.arange(0, W)
    if is_words(KIND):
        here = row[:, None] // GP == (w * n_parts(KIND) // 32)[None, :]
    else:
        here = (row[:, None] < GP) & (w >= 0)[None, :]
    here &= (row % GP < n)[:, None]
    queries, zero = (), tl.zeros([GROUPS * GP], tl.float32)
    for i in tl.static_range(n_parts(KIND)):
        d = dims(w, i, KIND)[None, :]
        x = tl.load(q + (r + row % GP)[:, None] * DIM + d, here & (d < DIM), other=0.0)
        x = (x * (factor / unit(i, KIND))).to(operand(KIND))
        zero -= tl.sum(x.to(tl.float32), 1) * (unit(i, KIND) * zero_code(KIND) / _lift(KIND))
        queries = queries + (x,)  # type: ignore[assignment]
    return queries, zero


@triton.jit
def _scores(
    queries, zero, keys, at, KIND: tl.constexpr, TILES: tl.constexpr, BS: tl.constexpr, GROUPS: tl.constexpr,
    GP: tl.constexpr, NP: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """(NP queries, tokens) of the blocks `at`, without `_lift`. Queries are repeated where NP is more than GP."""
    x = load_columns(keys, at, KIND, TILES, BS)
    T: tl.constexpr = x.shape[1]
    BYTES: tl.constexpr = 4 if is_words(KIND) else 1
    EACH: tl.constexpr = n_parts(KIND) // BYTES
    s = zero[:, None] + tl.zeros([GROUPS * GP, T], tl.float32)
    for i in tl.static_range(BYTES):
        parts = exact_parts(x, i, KIND, PLAIN)
        for j in tl.static_range(EACH):
            s = tl.dot(queries[i * EACH + j], parts[j], s)
    s = tl.reshape(s, [GROUPS, GP, T])
    if is_words(KIND):
        s *= load_scales(keys, at, KIND, TILES, BS).to(tl.float32)[:, None, :]
    s = tl.sum(s, 0)
    if NP > GP:
        s = tl.reshape(tl.broadcast_to(s[None, :, :], [NP // GP, GP, T]), [NP, T])
    return s


@triton.jit
def _add_values(
    acc, surplus, p, fade, values, at, seen, KIND: tl.constexpr, TILES: tl.constexpr, BS: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """acc · fade + V · p, and the same of the surplus. acc: for each part (columns, NP); p (tokens, NP).

    Tokens that are not `seen` have p = 0, which is not enough: a block's last owner may have left infinities there.
    """
    y = load_columns(values, at, KIND, TILES, BS, seen)
    scale, bias = y, y
    if is_words(KIND):
        scale = spread(load_scales(values, at, KIND, TILES, BS, seen), KIND)
        bias, extra = bias_of(scale, KIND, PLAIN)
        surplus = tl.dot(extra, p, surplus * fade[None, :])
    BYTES: tl.constexpr = 4 if is_words(KIND) else 1
    EACH: tl.constexpr = n_parts(KIND) // BYTES
    joined = ()
    for i in tl.static_range(BYTES):
        parts = scaled_parts(y, scale, bias, i, KIND, PLAIN)
        for j in tl.static_range(EACH):
            joined = joined + (tl.dot(parts[j], p, acc[i * EACH + j] * fade[None, :]),)  # type: ignore[assignment]
    return joined, surplus


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
@triton.jit(do_not_specialize=["table_stride", "head_rows", "first_row", "window", "n_splits", "min_blocks"])
def _attend(
    q, keys, values, tables, row_table, row_position, firsts,
    out, peaks, sums, table_stride, head_rows, first_row, window, factor, n_splits, min_blocks,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BS: tl.constexpr,
    G: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    let_next_start()
    CHUNKS: tl.constexpr = (GROUP + G - 1) // G
    row, head, split = tl.program_id(2), tl.program_id(0) // CHUNKS, tl.program_id(1)
    done = tl.program_id(0) % CHUNKS * G  # query heads of the group that other programs take
    n = tl.minimum(GROUP - done, G)
    table, position = tl.load(row_table + row), tl.load(row_position + row)
    first = tl.load(firsts + table)  # the position that the table starts with
    lowest = tl.maximum(position - window + 1, first)
    start, stop = (lowest - first) // BS, (position - first) // BS + 1  # blocks of the table
    wait()  # tables are there before the first kernel of a batch starts; queries, keys and values are not
    share = tl.maximum(tl.cdiv(stop - start, n_splits), min_blocks)
    begin, end = start + split * share, tl.minimum(start + (split + 1) * share, stop)
    if begin >= end:
        return
    TILES: tl.constexpr = (DIM + 31) // 32
    GROUPS: tl.constexpr = _n_groups(K_KIND, TILES, G)
    GP: tl.constexpr = _n_queries(K_KIND, TILES, G)
    NP: tl.constexpr = _n_query_columns(GP)
    LIFT: tl.constexpr = _lift(K_KIND)
    N: tl.constexpr = _n_blocks(K_KIND, V_KIND, TILES, BS)
    T: tl.constexpr = N * BS
    W: tl.constexpr = n_columns(V_KIND, TILES)
    r = row * (tl.num_programs(0) // CHUNKS * GROUP) + head * GROUP + done
    queries, zero = _load_queries(q, r, n, factor, K_KIND, DIM, TILES, GROUPS, GP)
    acc, surplus = (), tl.zeros([W, NP], tl.float32)
    for i in tl.static_range(n_parts(V_KIND)):
        acc = acc + (tl.zeros([W, NP], tl.float32),)  # type: ignore[assignment]
    peak, total = tl.full([NP], -float("inf"), tl.float32), tl.zeros([NP, T], tl.float32)
    tables += table * table_stride
    last = tl.minimum(position, first + end * BS - 1) - lowest
    blocks = look_up(tables, begin, end, N)
    for b in range(begin, end, N):
        at = ()
        for i in tl.static_range(N):
            at = at + (blocks[i].to(tl.int64) * head_rows + first_row + head,)  # type: ignore[assignment]
        blocks = look_up(tables, b + N, end, N)
        s = _scores(queries, zero, keys, at, K_KIND, TILES, BS, GROUPS, GP, NP, PLAIN)
        key = (first - lowest + b * BS + tl.arange(0, T)).to(tl.uint32)  # one comparison for both ends
        seen = key <= last.to(tl.uint32)
        s = tl.where(seen[None, :], s, -float("inf"))
        top = tl.maximum(peak, tl.max(s, 1))
        fade = tl.exp2((peak - top) * LIFT)
        p = tl.exp2(s * LIFT - (top * LIFT)[:, None])
        total = total * fade[:, None] + p
        peak = top
        p = tl.trans(p).to(operand(V_KIND))
        acc, surplus = _add_values(acc, surplus, p, fade, values, at, seen, V_KIND, TILES, BS, PLAIN)
    g, w = tl.arange(0, NP), tl.arange(0, W)[:, None]
    place = (r + g) * n_splits + split
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
    """Where the rows of a batch find their context. All int32, on the device; data, not shape."""

    blocks: torch.Tensor  # (tables, most blocks): of each sequence
    firsts: torch.Tensor  # (tables,): the position that the table starts with
    row_table: torch.Tensor  # (rows,)
    row_position: torch.Tensor  # (rows,)


@dataclass(frozen=True)
class Tuning:
    """How the kernel is launched: programs in all, registers of a thread where the compiler would take more."""

    n_programs: int
    registers: int | None = None
    stages: int = 3
    warps: int = 1

    def n_splits(self, n_rows: int, n_kv_heads: int) -> int:
        return max(1, self.n_programs // max(1, n_rows * n_kv_heads))


# Four programs for each multiprocessor of an H200; more are as fast, and leave more to combine. Measured with
# benchmarks/cuda_kernels.py. Values that are unpacked one by one are not worth the memory of a pipeline.
TUNINGS = {kind: Tuning(512) if is_fast(kind) else Tuning(512, stages=1, warps=4) for kind in KINDS}


@dataclass(frozen=True, eq=False)
class Shares:
    """What programs leave for `combine`: of each row, head and split."""

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


def supports(k_kind: str, v_kind: str, block_size: int) -> str | None:
    if unknown := {k_kind, v_kind} - set(KINDS):
        return f"no kernel for a cache of {' and '.join(sorted(unknown))}"
    if block_size < 16 or block_size & (block_size - 1):
        return f"blocks of {block_size} tokens are no power of two from 16"
    return None


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
    n_rows, n_heads, dim = q.shape
    n_kv_heads, block_size = head_rows.stop - head_rows.start, keys.block_size
    group = n_heads // n_kv_heads
    reason = supports(keys.kind, values.kind, block_size)
    assert reason is None, reason
    assert keys.n_tiles == values.n_tiles == triton.cdiv(dim, TILE)
    assert q.dtype == torch.float32
    assert q.is_contiguous()
    n_splits = out.peaks.shape[2]
    tuning = tuning or TUNINGS[values.kind if is_fast(keys.kind) else keys.kind]
    limits = {} if tuning.registers is None else {"maxnreg": tuning.registers}
    launch(
        _attend[(n_kv_heads * triton.cdiv(group, MOST_QUERIES), n_splits, n_rows)],
        q, keys.pointers, values.pointers,
        tables.blocks, tables.row_table, tables.row_position, tables.firsts,
        out.values, out.peaks, out.sums, tables.blocks.shape[1], keys.codes.shape[1], head_rows.start,
        window or 2**30, scale * LOG2E, n_splits, out.min_blocks,
        K_KIND=keys.kind, V_KIND=values.kind, GROUP=group, DIM=dim, BS=block_size, G=min(group, MOST_QUERIES),
        PLAIN=INTERPRETED, num_warps=tuning.warps, num_stages=tuning.stages, **limits,
        **overlapping(),
    )  # fmt: skip
    return out
