"""Packed matrix times one vector, or a few: out[m, n] = Σ_k W[n, k] · x[m, k] (+ residual[m, n]).

A vector comes as int8 per 32 values (`rows`): codes c, scale s, and total t = s · Σ c. With a block's integer
dot product d (by dp4a, four values an instruction) and the weight's scale w, a block adds

    Q8_0, IQ4, MXFP4  w · s · d    Q4_0  w · (s · d - 8 · t)    Q4_K  w · s · d - m · t    Q6_K  s · (w₀ · d₀ + w₁ · d₁)

All tensors of a program are (BN rows, BB blocks), a thread has four neighbouring blocks: 16-byte loads of each word
plane, and nothing moves between threads before the last sum. A few vectors (a token and its drafts, a few requests)
share the weights that a program has read: as long as memory is what it waits for, they cost little more than one. Each
vector's result is the same, bit for bit, as if it were alone. Long rows times one vector are multiplied by programs
that take many rows each (`_run_of_rows`). Reference: graph.ops.MatMul on the unpacked weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.bits import (
    INTERPRETED,
    dp4a,
    has_levels,
    high_half,
    levels_of,
    low_half,
)
from motley.backends.cuda.kernels.overlap import let_next_start, overlapping, wait
from motley.backends.cuda.kernels.rows import INT8, Rows
from motley.backends.cuda.planes import BLOCK, WeightPlanes

# That are cheaper this way than by tensor cores: measured with matrices of 5120 x 2048 and 2048 x 4096 in Q4_K.
_MAX_VECTORS = 8
# Of all programs that take a run of rows: 16 for each multiprocessor of an H200, whose registers hold 24.
_WARPS = 2112


@triton.jit
def _with_high_bits(nibbles, high, shift: tl.constexpr):
    """Four 6-bit codes less 32: (c + 0x60) ^ 0x80 is c - 32 in each byte, without a borrow."""
    return ((nibbles | (((high >> shift) & 0x03030303) << 4)) + 0x60606060) ^ -0x7F7F7F80


@triton.jit
def load_blocks(codes, high, scale, n, b, there, BLOCKS: tl.constexpr, KIND: tl.constexpr):
    """Blocks b (1, BB) of rows n (BN, 1): words of codes, scales, high bits; (BN, BB) each."""
    WORDS: tl.constexpr = 8 if KIND == "Q8_0" else 4
    words = ()
    for j in tl.static_range(WORDS):
        words = words + (tl.load(codes + (n * WORDS + j) * BLOCKS + b, there, other=0),)  # type: ignore[assignment]
    w = tl.load(scale + n * BLOCKS + b, there, other=0)
    h0, h1 = w, w
    if KIND == "Q6_K":
        h0 = tl.load(high + n * 2 * BLOCKS + b, there, other=0)
        h1 = tl.load(high + (n * 2 + 1) * BLOCKS + b, there, other=0)
    return words, w, h0, h1


@triton.jit
def load_vector(xq, xs, xt, b, inside, BLOCKS: tl.constexpr, KIND: tl.constexpr):
    """Blocks b of a vector of int8: its eight words, scales, and totals where this kind of weights needs them."""
    words = ()
    for j in tl.static_range(8):
        words = words + (tl.load(xq + j * BLOCKS + b, inside, other=0),)  # type: ignore[assignment]
    s = tl.load(xs + b, inside, other=0.0)
    t = s
    if KIND == "Q4_0" or KIND == "Q4_K":
        t = tl.load(xt + b, inside, other=0.0)
    return words, s, t


@triton.jit
def block_products(words, w, h0, h1, x, s, t, zero, KIND: tl.constexpr, PLAIN: tl.constexpr):
    """Each block's addend of its row's product; see `load_blocks` and `load_vector`."""
    d, e = zero, zero  # of the low and the high half of blocks
    for j in tl.static_range(4):
        word, upper = words[j], words[j + 4 if KIND == "Q8_0" else j]
        low = word
        if has_levels(KIND):
            low, upper = levels_of(word, KIND, False, PLAIN), levels_of(word, KIND, True, PLAIN)
        elif KIND != "Q8_0":
            low, upper = word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F
        if KIND == "Q6_K":
            low, upper = _with_high_bits(low, h0, 2 * j), _with_high_bits(upper, h1, 2 * j)
            e = dp4a(upper, x[j + 4] + zero, e, PLAIN)
        else:
            d = dp4a(upper, x[j + 4] + zero, d, PLAIN)
        d = dp4a(low, x[j] + zero, d, PLAIN)
    if KIND == "Q6_K":
        return s * (
            low_half(w).to(tl.float32) * d.to(tl.float32) + high_half(w).to(tl.float32) * e.to(tl.float32)
        )
    elif KIND == "Q8_0" or has_levels(KIND):
        return w.to(tl.float32) * (s * d.to(tl.float32))
    elif KIND == "Q4_0":
        return w.to(tl.float32) * (s * d.to(tl.float32) - 8.0 * t)
    else:
        return low_half(w).to(tl.float32) * (s * d.to(tl.float32)) - high_half(w).to(tl.float32) * t


@triton.jit
def row_products(
    codes, high, scale, xq, xs, xt, n, quads,
    BLOCKS: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, PLAIN: tl.constexpr,
    ok=None,
):  # fmt: skip
    """Products of rows n (BN, 1) of a packed matrix with one vector, or with one for each row: (BN,).

    xq, xs, xt: the vector's addresses, one of each or (BN, 1). Rows that are not `ok` (BN, 1) are not read. Weights are
    read before what an earlier kernel computes is waited for.
    """
    acc = tl.zeros([BN, BB], tl.float32)
    zero = tl.zeros([BN, BB], tl.int32)
    for first in range(0, BLOCKS, BB):
        # `quads` is 0, but the compiler only knows that 4 divides this: so it gives a thread four blocks in every
        # plane, also of float16, where it would prefer eight and then exchange them through shared memory.
        b = first + quads * 4 + tl.arange(0, BB)[None, :]  # (1, BB)
        inside = b < BLOCKS
        there = inside if ok is None else inside & ok
        words, w, h0, h1 = load_blocks(codes, high, scale, n, b, there, BLOCKS, KIND)
        wait()
        x, s, t = load_vector(xq, xs, xt, b, inside, BLOCKS, KIND)
        acc += block_products(words, w, h0, h1, x, s, t, zero, KIND, PLAIN)
    return tl.sum(acc, 1)


@triton.jit
def _store_row(out, residual, total, row, m, n_rows, HAS_RESIDUAL: tl.constexpr):
    at = m * n_rows + row
    if HAS_RESIDUAL:
        total += tl.load(residual + at, row < n_rows, other=0.0)
    tl.store(out + at, total, row < n_rows)


@triton.jit(do_not_specialize=["quads", "n_vectors"])
def _matvec(
    codes, high, scale, xq, xs, xt, residual, out, n_rows, quads, n_vectors,
    BLOCKS: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, MANY: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    let_next_start()
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    n = tl.minimum(row, n_rows - 1).to(tl.int64)[:, None]  # (BN, 1)
    if MANY:  # whole rows stay in registers
        b = quads * 4 + tl.arange(0, BB)[None, :]  # see `row_products`
        inside = b < BLOCKS
        words, w, h0, h1 = load_blocks(codes, high, scale, n, b, inside, BLOCKS, KIND)
        wait()
        for m in range(n_vectors):
            x, s, t = load_vector(
                xq + m * (BLOCKS * 8), xs + m * BLOCKS, xt + m * BLOCKS, b, inside, BLOCKS, KIND
            )
            zero = tl.zeros([BN, BB], tl.int32)
            total = tl.sum(block_products(words, w, h0, h1, x, s, t, zero, KIND, PLAIN), 1)
            _store_row(out, residual, total, row, m, n_rows, HAS_RESIDUAL)
    else:
        total = row_products(codes, high, scale, xq, xs, xt, n, quads, BLOCKS, KIND, BN, BB, PLAIN)
        _store_row(out, residual, total, row, 0, n_rows, HAS_RESIDUAL)


@triton.jit(do_not_specialize=["quads"])
def _run_of_rows(
    codes, high, scale, xq, xs, xt, residual, out, n_rows, quads,
    BLOCKS: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """Rows in runs, one for each program, with the vector in registers and the weights of the next rows under way."""
    let_next_start()
    n_groups, n_programs = tl.cdiv(n_rows, BN), tl.num_programs(0)
    begin = (tl.program_id(0) * n_groups) // n_programs
    end = ((tl.program_id(0) + 1) * n_groups) // n_programs
    b = quads * 4 + tl.arange(0, BB)[None, :]  # see `row_products`
    inside, row = b < BLOCKS, begin * BN + tl.arange(0, BN)
    n = tl.minimum(row, n_rows - 1).to(tl.int64)[:, None]
    words, w, h0, h1 = load_blocks(codes, high, scale, n, b, inside, BLOCKS, KIND)
    wait()
    x, s, t = load_vector(xq, xs, xt, b, inside, BLOCKS, KIND)
    zero = tl.zeros([BN, BB], tl.int32)
    for g in range(begin, end):
        n = tl.minimum(row + BN, n_rows - 1).to(tl.int64)[:, None]
        later = load_blocks(codes, high, scale, n, b, inside & (g + 1 < end), BLOCKS, KIND)
        total = tl.sum(block_products(words, w, h0, h1, x, s, t, zero, KIND, PLAIN), 1)
        _store_row(out, residual, total, row, 0, n_rows, HAS_RESIDUAL)
        words, w, h0, h1 = later
        row += BN


@dataclass(frozen=True)
class Tile:
    """Rows and blocks of a program's tile, and its warps. Measured on an H200: benchmarks/cuda_kernels.py."""

    rows: int
    blocks: int
    warps: int


def tile_for(n_columns: int) -> Tile:
    """Up to 4096 values a warp has whole rows; of longer ones, up to 32,768, several warps have one."""
    if n_columns <= 64 * BLOCK:
        return Tile(16, 64, 4)
    if n_columns <= 128 * BLOCK:
        return Tile(2, 128, 1)
    warps = min(8, triton.next_power_of_2(triton.cdiv(n_columns, 128 * BLOCK)))
    return Tile(1, 128 * warps, warps)


def max_vectors(n_columns: int, tile: Tile | None = None) -> int:
    """How many vectors one launch takes: several only if a program has whole rows, which it then reads once."""
    return _MAX_VECTORS if _has_whole_rows(tile or tile_for(n_columns), n_columns) else 1


def _has_whole_rows(tile: Tile, n_columns: int) -> bool:
    return n_columns <= tile.blocks * BLOCK


def matvec(
    weight: WeightPlanes,
    x: Rows,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """out (rows, n_rows) float32 = x (rows, n_columns) · weightᵀ (+ residual, which may be `out` itself)."""
    assert weight.is_packed, weight.kind
    assert (x.form, x.n_columns) == (INT8, weight.n_columns), "not int8, or another width"
    assert 1 <= x.n_rows <= max_vectors(weight.n_columns, tile)
    assert out.shape == (x.n_rows, weight.n_rows)
    assert out.dtype == torch.float32
    assert out.is_contiguous()
    tile = tile or tile_for(weight.n_columns)
    n_groups = triton.cdiv(weight.n_rows, tile.rows)
    given = (
        weight.codes, weight.codes if weight.high is None else weight.high, weight.scale,
        x.values, x.scale, x.total, out if residual is None else residual, out, weight.n_rows, 0,
    )  # fmt: skip
    options = {
        "BLOCKS": weight.n_columns // BLOCK, "KIND": weight.kind, "BN": tile.rows, "BB": tile.blocks,
        "HAS_RESIDUAL": residual is not None, "PLAIN": INTERPRETED, "num_warps": tile.warps, **overlapping(),
    }  # fmt: skip
    if x.n_rows == 1 and tile.rows == 1 and _has_whole_rows(tile, weight.n_columns):
        _run_of_rows[(min(n_groups, _WARPS // tile.warps),)](*given, **options)
    else:
        _matvec[(n_groups,)](*given, x.n_rows, MANY=x.n_rows > 1, **options)
    return out
