"""Attention of bundles (see `attention`) on Hopper's tensor cores: softmax(scale · q·Kᵀ)·V, split over the context.

Rows of the products are tokens (scores) and dims (values), 64 at a time, and queries are columns: K and V are the
operands that come from registers, where codes have just been made float16, and each code is unpacked once for up to 64
queries. Queries and softmax's weights are in shared memory.

    K   (token, unit) 16-bit units of a token's codes; a part of all units, one code of each, is one product
    V   (unit, token) the same, of 64 units or, where these have four codes, of two parts of 32
    q8_0  part i: dim 2u + i      q4_0  part 2i + h: dim 2 (u % 8) + i + 16 h of tile u // 8      f16  a unit is a dim

Two neighbours' codes become a pair of float16 by a byte permutation and a logical instruction: over 0x6400, they are
1024 + code.
Weights are relative to a peak that is only raised when a score exceeds it by 2¹⁰: sums are rarely rescaled.
What is left in `Shares` is as `attention` leaves it. Reference: graph.ops.Attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from motley.backends.cuda.kernels.attention import LOG2E, Shares, Tables, look_up
from motley.backends.cuda.kernels.bits import INTERPRETED, finite_halves, part_as_half
from motley.backends.cuda.kernels.overlap import let_next_start, overlapping, wait
from motley.backends.cuda.kernels.pipeline import launch
from motley.backends.cuda.kernels.seen_rows import depth, hides, load_seen
from motley.backends.cuda.kernels.tiles import CachePlanes

KINDS = ("f16", "q8_0", "q4_0")
DIM = 128  # of a head; others have too many registers, or too few rows
_TOKENS = 64  # of a round: rows of a tensor core's tile
_HIGHEST = tl.constexpr(10.0)  # a weight's exponent: float16 ends at 2¹⁶


def supports(k_kind: str, v_kind: str, dim: int, block_size: int) -> bool:
    """Whether this kernel is the one for bundles, on the GPU that is current."""
    is_hopper = INTERPRETED or driver.active.get_current_target().arch == 90
    return is_hopper and k_kind in KINDS and v_kind in KINDS and dim == DIM and block_size <= _TOKENS


@dataclass(frozen=True)
class Tuning:
    """How the kernel is launched for up to `n_queries` of a bundle and a KV head."""

    n_queries: int
    n_programs: int  # in all: as many as the GPU has room for
    registers: int | None = None  # of a thread, where the compiler would take more
    stages: int = 3

    def n_splits(self, n_bundles: int, n_queries: int, n_kv_heads: int) -> int:
        """`n_queries`: of a bundle and a KV head."""
        n_programs = n_bundles * n_kv_heads * -(-n_queries // self.n_queries)
        return max(1, self.n_programs // max(1, n_programs))


# Measured on an H200 with benchmarks/cuda_kernels.py: three or two programs for each multiprocessor; of f16, 32 queries
# have shared memory for two.
TUNINGS = (Tuning(16, 396, 168), Tuning(32, 396, 168), Tuning(64, 264))
_OF_HALVES = (TUNINGS[0], Tuning(32, 264), TUNINGS[2])


def tuning_of(n_queries: int, k_kind: str, v_kind: str) -> Tuning:
    """The launch shape for bundles with this number of queries per KV head; more than 64 are several programs."""
    tunings = _OF_HALVES if k_kind == v_kind == "f16" else TUNINGS
    return next((tuning for tuning in tunings if n_queries <= tuning.n_queries), tunings[-1])


@triton.constexpr_function
def _n_parts(kind):
    """Codes of a unit."""
    return {"q8_0": 2, "q4_0": 4}.get(kind, 1)


@triton.constexpr_function
def _n_sums(kind):
    """Products with V: one for each part, or for two of 32 units."""
    return 1 if kind == "f16" else 2


@triton.jit
def _dims(u, part: tl.constexpr, KIND: tl.constexpr):
    """Which dims are in part `part` of units u."""
    if KIND == "q8_0":
        return 2 * u + part
    elif KIND == "q4_0":
        return u // 8 * 32 + u % 8 * 2 + part // 2 + part % 2 * 16
    else:
        return u


@triton.jit
def _values(units, scale, part: tl.constexpr, KIND: tl.constexpr, PLAIN: tl.constexpr):
    """float16 values of one part. An upper nibble stays where it is, and is sixteen times too large."""
    if KIND == "q8_0":
        return (part_as_half(units, part, 0xFF, 0x6480, PLAIN) - 1152.0) * scale
    elif KIND == "q4_0":
        if part % 2:
            return (part_as_half(units, part // 2, 0xF0, 0x6400, PLAIN) - 1152.0) * (scale * 0.0625)
        else:
            return (part_as_half(units, part // 2, 0x0F, 0x6400, PLAIN) - 1032.0) * scale
    else:
        return units


@triton.jit
def _by_eights(a, b):
    """Rows of two parts (units, tokens), eight of each at a time: as a thread of the tensor cores has them."""
    U: tl.constexpr = a.shape[0]
    T: tl.constexpr = a.shape[1]
    both = tl.join(tl.reshape(a, [U // 8, 8, T]), tl.reshape(b, [U // 8, 8, T]))
    return tl.reshape(tl.permute(both, (0, 3, 1, 2)), [2 * U, T])


@triton.jit
def _operand(units, scale, i: tl.constexpr, KIND: tl.constexpr, PLAIN: tl.constexpr):
    """Operand i of the products with V, 64 or 128 rows."""
    if KIND == "q4_0":
        low = _values(units, scale, 2 * i, KIND, PLAIN)
        return _by_eights(low, _values(units, scale, 2 * i + 1, KIND, PLAIN))
    else:
        return _values(units, scale, i, KIND, PLAIN)


@triton.jit
def _rows_of(m, i: tl.constexpr, KIND: tl.constexpr):
    """Which dims are in rows m of `_operand` i."""
    if KIND == "q4_0":
        return _dims(m // 16 * 8 + m % 8, 2 * i, KIND) + m // 8 % 2 * 16
    else:
        return _dims(m, i, KIND)


@triton.jit
def _head_of(at, t, BS: tl.constexpr):
    """The head that token t belongs to: of the blocks' heads `at`."""
    head = at[0]
    for i in tl.static_range(1, len(at)):
        head = tl.where(t < i * BS, head, at[i])
    return head


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
def _attend_bundle(
    q, k_units, k_scales, v_units, v_scales, tables, bundle_table, bundle_position, bundle_row, bundle_count,
    seen_rows, firsts, out, peaks, sums, table_stride, head_rows, first_row, window, factor, n_splits, min_blocks,
    n_chunks,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BS: tl.constexpr,
    G: tl.constexpr, N: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    let_next_start()
    bundle, head, split = tl.program_id(2), tl.program_id(0) // n_chunks, tl.program_id(1)
    done = tl.program_id(0) % n_chunks * G  # queries of the bundle that other programs take
    row, count = tl.load(bundle_row + bundle), tl.load(bundle_count + bundle)
    n = tl.minimum(count * GROUP - done, G)
    table, position = tl.load(bundle_table + bundle), tl.load(bundle_position + bundle)
    first = tl.load(firsts + table)  # the position that the table starts with
    lowest, highest = tl.maximum(position - window + 1, first), position + count - 1  # of the whole bundle
    start, stop = (lowest - first) // BS, (highest - first) // BS + 1  # blocks of the table
    share = tl.maximum(tl.cdiv(stop - start, n_splits), min_blocks)
    begin, end = start + split * share, tl.minimum(start + (split + 1) * share, stop)
    last = tl.minimum(highest, first + end * BS - 1)  # key of this share
    tables += table * table_stride
    blocks = look_up(tables, begin, tl.maximum(end, 1), N)  # a bundle without rows has a table all the same
    wait()  # tables are there before the first kernel of a batch starts; queries, keys and values are not
    if (begin >= end) | (n <= 0):
        return
    TILES: tl.constexpr = DIM // 32
    T: tl.constexpr = N * BS
    K_UNITS: tl.constexpr = 32 // _n_parts(K_KIND)  # of a tile
    V_UNITS: tl.constexpr = 32 // _n_parts(V_KIND)
    g = tl.arange(0, G)
    number = (done + g) // GROUP  # of each query's row
    n_heads = tl.num_programs(0) // n_chunks * GROUP
    line = ((row + number) * n_heads + head * GROUP + (done + g) % GROUP).to(tl.int64)
    queries, u = (), tl.arange(0, TILES * K_UNITS)
    for i in tl.static_range(_n_parts(K_KIND)):
        d = _dims(u, i, K_KIND)[:, None]
        query = tl.load(q + line[None, :] * DIM + d, (g < n)[None, :] & (d >= 0), other=0.0)
        queries = queries + ((query * factor).to(tl.float16),)  # type: ignore[assignment]
    acc, peak, total = (), tl.full([G], -1e30, tl.float32), tl.zeros([T, G], tl.float32)
    for i in tl.static_range(_n_sums(V_KIND)):
        acc = acc + (tl.zeros([DIM // _n_sums(V_KIND), G], tl.float32),)  # type: ignore[assignment]
    tile = tl.arange(0, TILES)
    for b in range(begin, end, N):
        at = ()
        for i in tl.static_range(N):
            at = at + (blocks[i].to(tl.int64) * head_rows + first_row + head,)  # type: ignore[assignment]
        blocks = look_up(tables, b + N, end, N)
        # The order of dims of these addresses decides whether tiles are copied to shared memory and read from there as
        # operands, or take a second way through it: see benchmarks/results/cuda-notes.md.
        t, unit = tl.arange(0, T)[None, :, None], tl.arange(0, K_UNITS)[None, None, :]
        k = k_units + _head_of(at, t, BS) * (TILES * BS * K_UNITS)
        x = tl.load(k + ((tile[:, None, None] * BS + t % BS) * K_UNITS + unit))
        x = tl.reshape(tl.permute(x, (1, 0, 2)), [T, TILES * K_UNITS])
        scale = x
        if K_KIND != "f16":
            t = tl.arange(0, T)[:, None]
            scale = tl.load(k_scales + _head_of(at, t, BS) * (TILES * BS) + (tile[None, :] * BS + t % BS))
            scale = tl.broadcast_to(scale[:, :, None], [T, TILES, K_UNITS])
            scale = tl.reshape(scale, [T, TILES * K_UNITS])
        s = tl.zeros([T, G], tl.float32)
        for i in tl.static_range(_n_parts(K_KIND)):
            s = tl.dot(_values(x, scale, i, K_KIND, PLAIN), queries[i], s)

        key = first + b * BS + tl.arange(0, T)
        is_last = first + (b + N) * BS > tl.minimum(
            position, last
        )  # of the share, or with the bundle's own keys
        if is_last | (first + b * BS <= highest - window):
            # Masks are loaded again where they are needed: they would take 3 registers for each 4 queries.
            low, high = load_seen(seen_rows, row + number, number < count)
            own, key_row = position + depth(low, high), key - position
            of_key = load_seen(seen_rows, row + key_row, (key_row >= 0) & (key_row < count))
            key_depth = depth(of_key[0], of_key[1])[:, None]
            is_hidden = hides(low[None, :], high[None, :], key_row[:, None], key_depth, window)
            is_hidden |= (own[None, :] - key[:, None] >= window) | (key > last)[:, None]
            s = tl.where(is_hidden, -float("inf"), s)
        if tl.max(tl.max(s - peak[None, :], 1), 0) > _HIGHEST:
            top = tl.maximum(peak, tl.max(s, 0))
            rescale = tl.exp2(peak - top)
            total *= rescale[None, :]
            rescaled = ()
            for i in tl.static_range(_n_sums(V_KIND)):
                rescaled = rescaled + (acc[i] * rescale[None, :],)  # type: ignore[assignment]
            acc, peak = rescaled, top
        p = tl.exp2(s - peak[None, :])
        total += p
        p = p.to(tl.float16)

        t, unit = tl.arange(0, T)[None, None, :], tl.arange(0, V_UNITS)[:, None, None]
        v = v_units + _head_of(at, t, BS) * (TILES * BS * V_UNITS)
        v += (tile[None, :, None] * BS + t % BS) * V_UNITS + unit
        # Tokens that are not seen have p = 0, which is not enough: a block's last owner may have left infinities.
        if V_KIND == "f16":
            y = tl.load(v, (t <= last - first - b * BS) & (tile >= 0)[None, :, None] & (unit >= 0), other=0.0)
        else:
            y = tl.load(v)
        y = tl.reshape(tl.permute(y, (1, 0, 2)), [TILES * V_UNITS, T])
        scale = y
        if V_KIND != "f16":
            t = tl.arange(0, T)[None, :]
            scale = tl.load(v_scales + _head_of(at, t, BS) * (TILES * BS) + (tile[:, None] * BS + t % BS))
            scale = tl.broadcast_to(finite_halves(scale, PLAIN)[:, None, :], [TILES, V_UNITS, T])
            scale = tl.reshape(scale, [TILES * V_UNITS, T])
        joined = ()
        for i in tl.static_range(_n_sums(V_KIND)):
            joined = joined + (tl.dot(_operand(y, scale, i, V_KIND, PLAIN), p, acc[i]),)  # type: ignore[assignment]
        acc = joined
    place = line * n_splits + split
    m = tl.arange(0, DIM // _n_sums(V_KIND))
    for i in tl.static_range(_n_sums(V_KIND)):
        d = _rows_of(m, i, V_KIND)[:, None]
        tl.store(out + place[None, :] * DIM + d, acc[i], (g < n)[None, :] & (d >= 0))
    tl.store(peaks + place, peak, g < n)
    tl.store(sums + place, tl.sum(total, 0), g < n)


def attend_bundles(
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
    """q (rows, heads, dim) float32 over the KV heads `head_rows` of the cache → shares. As `attend`."""
    _, n_heads, dim = q.shape
    n_kv_heads, block_size = head_rows.stop - head_rows.start, keys.block_size
    group = n_heads // n_kv_heads
    assert supports(keys.kind, values.kind, dim, block_size)
    assert q.dtype == torch.float32
    assert q.is_contiguous()
    n_splits, n_queries = out.peaks.shape[2], tables.most_rows * group
    tuning = tuning or tuning_of(n_queries, keys.kind, values.kind)
    n_chunks = triton.cdiv(n_queries, tuning.n_queries)
    limits = {} if tuning.registers is None else {"maxnreg": tuning.registers}
    launch(
        _attend_bundle[(n_kv_heads * n_chunks, n_splits, len(tables.table))],
        q, _units(keys), keys.scale, _units(values), values.scale,
        tables.blocks, tables.table, tables.position, *tables.rows_and_counts, tables.masks, tables.firsts,
        out.values, out.peaks, out.sums, tables.blocks.shape[1], keys.codes.shape[1], head_rows.start,
        window or 2**30, scale * LOG2E, n_splits, out.min_blocks, n_chunks,
        K_KIND=keys.kind, V_KIND=values.kind, GROUP=group, DIM=dim, BS=block_size, G=tuning.n_queries,
        N=max(1, _TOKENS // block_size), PLAIN=INTERPRETED, num_warps=4, num_stages=tuning.stages, **limits,
        **overlapping(),
    )  # fmt: skip
    return out


def _units(planes: CachePlanes) -> torch.Tensor:
    """Codes as 16-bit units."""
    return planes.codes if planes.kind == "f16" else planes.codes.view(torch.int16)
