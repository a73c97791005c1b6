"""Queries against tiles of the cache (`attention`): scores with keys, sums of values. As little as possible is done per
code (see `tiles`):

    scores   rows of the product are (tile of 32 dims, query): a query's row is zero outside of its tile. So scores
             come apart by tile, K's codes enter as they are, and K's scales multiply (tile, query, token) sums.
             A bundle's queries fill the rows without that (`is_dense`): there K's codes are scaled first, as V's;
             so are those of wide heads (`is_wide`).
    values   columns of the product are queries, so that sixteen rows of a tensor core's tile are all dims. The zero
             codes' share is one more product, of what all codes have too much, and is subtracted at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from motley.backends.cuda.kernels.bits import byte_as_half
from motley.backends.cuda.kernels.tiles import (
    bias_of,
    dims,
    exact_parts,
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


@triton.constexpr_function
def is_dense(kind, bundled):
    """Whether K's words are scaled before the product of scores, which then has one row for each query."""
    return is_words(kind) and bundled


@triton.constexpr_function
def is_wide(kind, n_tiles, bundled):
    """Whether K's codes are made values, without a surplus: rows that are zeros but in one of many tiles would be most
    of the work, and registers do not suffice for surpluses.
    """
    return kind == "q8_0" and n_tiles > 4 and not bundled


@triton.constexpr_function
def is_by_tile(kind, n_tiles, bundled):
    """Whether K's codes enter the product as they are, and scales multiply sums of tiles."""
    return is_words(kind) and not is_dense(kind, bundled) and not is_wide(kind, n_tiles, bundled)


@triton.constexpr_function
def n_groups(kind, n_tiles, group, bundled):
    """Groups of rows in the product of scores: one for each tile; of plain values what fills a tensor core's tile."""
    if is_dense(kind, bundled):
        return 1
    if is_by_tile(kind, n_tiles, bundled):
        return n_columns(kind, n_tiles) * n_parts(kind) // 32
    return max(1, 16 // max(8, triton.next_power_of_2(group)))


@triton.constexpr_function
def n_queries(kind, n_tiles, group, bundled):
    """Rows of a group: the queries, padded."""
    return max(triton.next_power_of_2(group), 16 // n_groups(kind, n_tiles, group, bundled))


@triton.constexpr_function
def n_query_columns(n_queries):
    return max(8, n_queries)


@triton.constexpr_function
def lift(kind, n_tiles, bundled):
    """Codes enter as subnormal numbers, or scaled, as an eighth of values."""
    if is_dense(kind, bundled):
        return 8.0
    return 2.0**24 if is_by_tile(kind, n_tiles, bundled) else 1.0


@triton.jit
def query_rows(first, x, n_heads, GROUP: tl.constexpr, BUNDLED: tl.constexpr):
    """The places of a bundle's queries x among (rows, heads); `first`: its first row's first head that counts."""
    if not BUNDLED:
        return first + x
    return first + x // GROUP * n_heads + x % GROUP


@triton.jit
def load_queries(
    q, first, done, n, n_heads, factor, KIND: tl.constexpr, DIM: tl.constexpr, TILES: tl.constexpr,
    GROUPS: tl.constexpr, GP: tl.constexpr, GROUP: tl.constexpr, BUNDLED: tl.constexpr,
):  # fmt: skip
    """Loads an operand (GROUPS · GP, columns) for each part of K, and the amount that zero codes add to each row's sum.

    If `is_dense`, the sum of all operands instead of the latter: `bias_of` has a surplus for it.
    `n` queries of a bundle, from number `done` on.
    """
    W: tl.constexpr = n_columns(KIND, TILES)
    row, w = tl.arange(0, GROUPS * GP), tl.arange(0, W)
    if is_by_tile(KIND, TILES, BUNDLED):
        here = row[:, None] // GP == (w * n_parts(KIND) // 32)[None, :]
    else:
        here = (row[:, None] < GP) & (w >= 0)[None, :]
    here &= (row % GP < n)[:, None]
    r = query_rows(first, done + row % GP, n_heads, GROUP, BUNDLED)
    queries, zero = (), tl.zeros([GROUPS * GP], tl.float32)
    total = tl.zeros([GROUPS * GP, W], tl.float32)
    for i in tl.static_range(n_parts(KIND)):
        d = dims(w, i, KIND)[None, :]
        x = tl.load(q + r[:, None] * DIM + d, here & (d < DIM), other=0.0)
        x = (x * (factor / unit(i, KIND))).to(operand(KIND))
        if is_dense(KIND, BUNDLED):
            total += x.to(tl.float32) * unit(i, KIND)
        elif is_by_tile(KIND, TILES, BUNDLED):
            zero -= tl.sum(x.to(tl.float32), 1) * (
                unit(i, KIND) * zero_code(KIND) / lift(KIND, TILES, BUNDLED)
            )
        queries = queries + (x,)  # type: ignore[assignment]
    return queries, total.to(operand(KIND)) if is_dense(KIND, BUNDLED) else zero


@triton.jit
def scores(
    queries, zero, keys, at, KIND: tl.constexpr, TILES: tl.constexpr, BS: tl.constexpr, GROUPS: tl.constexpr,
    GP: tl.constexpr, NP: tl.constexpr, BUNDLED: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """(NP queries, tokens) of the blocks `at`, without `lift`. Queries are repeated where NP is more than GP."""
    x = load_columns(keys, at, KIND, TILES, BS)
    T: tl.constexpr = x.shape[1]
    BYTES: tl.constexpr = 4 if is_words(KIND) else 1
    EACH: tl.constexpr = n_parts(KIND) // BYTES
    DENSE: tl.constexpr = is_dense(KIND, BUNDLED)
    WIDE: tl.constexpr = is_wide(KIND, TILES, BUNDLED)
    scale, bias = x, x
    if WIDE:
        scale = spread(load_scales(keys, at, KIND, TILES, BS), KIND)
    if DENSE:
        scale = spread(load_scales(keys, at, KIND, TILES, BS), KIND)
        bias, extra = bias_of(scale, KIND, PLAIN)
        s = -tl.dot(zero, extra)
    else:
        s = zero[:, None] + tl.zeros([GROUPS * GP, T], tl.float32)
    for i in tl.static_range(BYTES):
        if DENSE:
            parts = scaled_parts(x, scale, bias, i, KIND, PLAIN)
        elif WIDE:
            parts = ((byte_as_half(x, i, 0x6400, PLAIN) - 1152.0) * scale,)
        else:
            parts = exact_parts(x, i, KIND, PLAIN)
        for j in tl.static_range(EACH):
            s = tl.dot(queries[i * EACH + j], parts[j], s)
    s = tl.reshape(s, [GROUPS, GP, T])
    if is_by_tile(KIND, TILES, BUNDLED):
        s *= load_scales(keys, at, KIND, TILES, BS).to(tl.float32)[:, None, :]
    s = tl.sum(s, 0)
    if NP > GP:
        s = tl.reshape(tl.broadcast_to(s[None, :, :], [NP // GP, GP, T]), [NP, T])
    return s


@triton.jit
def add_values(
    acc, surplus, p, rescale, values, at, seen, KIND: tl.constexpr, TILES: tl.constexpr, BS: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """acc · rescale + V · p, and the same of the surplus. acc: for each part (columns, NP); p (tokens, NP).

    Tokens that are not `seen` have p = 0, which is not enough: a block's last owner may have left infinities there.
    """
    y = load_columns(values, at, KIND, TILES, BS, seen)
    scale, bias = y, y
    if is_words(KIND):
        scale = spread(load_scales(values, at, KIND, TILES, BS, seen), KIND)
        bias, extra = bias_of(scale, KIND, PLAIN)
        surplus = tl.dot(extra, p, surplus * rescale[None, :])
    BYTES: tl.constexpr = 4 if is_words(KIND) else 1
    EACH: tl.constexpr = n_parts(KIND) // BYTES
    joined = ()
    for i in tl.static_range(BYTES):
        parts = scaled_parts(y, scale, bias, i, KIND, PLAIN)
        for j in tl.static_range(EACH):
            joined = joined + (tl.dot(parts[j], p, acc[i * EACH + j] * rescale[None, :]),)  # type: ignore[assignment]
    return joined, surplus
