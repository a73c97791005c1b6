"""Packed matrix times a few rows: out[m, n] = Σ_k x[m, k] · W[n, k] (+ residual[m, n]), weights unpacked in the tile.

The rows come as float16 after division by their largest magnitude (`rows.HALVES`), value i of all blocks of 32
before value i + 1 of any. So each of the 32 values of a block is a tile (BN rows, BB blocks) of its own: byte i of a
word, times the tile of scales that lies exactly like it, is an operand for the tensor cores. Codes become float16 by
setting the exponent's bits: 0x6400 | c is 1024 + c. Zeros and minima of nibbles are a product with the totals of the
rows' blocks. Reference: graph.ops.MatMul on the unpacked weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels import warpgroup_matmul as warpgroups
from motley.backends.cuda.kernels.bits import (
    INTERPRETED,
    biased_nibble,
    both_halves,
    byte_as_half,
    has_levels,
    levels_of,
    multiply_add,
    nibbles_as_halves,
)
from motley.backends.cuda.kernels.overlap import let_next_start, overlapping, wait
from motley.backends.cuda.kernels.pipeline import launch
from motley.backends.cuda.kernels.rows import HALVES, Rows
from motley.backends.cuda.planes import BLOCK, WeightPlanes


@triton.jit
def tile_values(
    word, high, w0, w1, j, KIND: tl.constexpr, i: tl.constexpr, UPPER: tl.constexpr, PLAIN: tl.constexpr
):
    """Value 4j + i (of the upper half of blocks: 16 + 4j + i) of a tile of blocks, as float16.

    w0, w1: the scale, and the minimum (Q4_K) or the upper half's scale (Q6_K).
    """
    if KIND == "Q8_0":
        return (byte_as_half(word, i, 0x6400, PLAIN) - 1152.0) * w0
    elif has_levels(KIND):
        return (byte_as_half(levels_of(word, KIND, UPPER, PLAIN), i, 0x6400, PLAIN) - 1152.0) * w0
    elif KIND == "Q4_0":
        return (biased_nibble(word, i, UPPER, PLAIN) - 1032.0) * w0
    elif KIND == "Q4_K":
        return (biased_nibble(word, i, UPPER, PLAIN) - 1024.0) * w0 - w1
    else:
        upper_bits = biased_nibble((high >> (2 * j)) & 0x03030303, i, False, PLAIN) - 1024.0
        code = biased_nibble(word, i, UPPER, PLAIN) - 1056.0 + upper_bits * 16.0
        return code * (w1 if UPPER else w0)


@triton.constexpr_function
def has_totals(kind):
    """Kinds of nibbles whose zero or minimum is a product of its own, with the totals of blocks."""
    return kind == "Q4_0" or kind == "Q4_K"


@triton.jit
def nibble_tiles(word, w, w_small, i: tl.constexpr, PLAIN: tl.constexpr):
    """Values 4j + i and 16 + 4j + i before their zero or minimum: one permutation for both, and a multiply-add each.

    1024 · w is exact, so that (1024 + c) · w - 1024 · w is c · w, rounded once. Upper nibbles are 16 times too large:
    `w_small` is w / 16, where that is a subnormal number, rounded; so it is `w_small` that is subtracted again.
    """
    low, high = nibbles_as_halves(word, i, 0x6400, PLAIN)
    a = multiply_add(low, w, w * -1024.0, PLAIN)
    return a, multiply_add(high, w_small, w_small * -1024.0, PLAIN)


@triton.constexpr_function
def n_steps(blocks, kind, n_at_once):
    """Steps of `tile_step` for a row of `blocks` blocks."""
    n_words = blocks * (8 if kind == "Q8_0" else 4)
    return (n_words + n_at_once - 1) // n_at_once


@triton.jit
def tile_step(
    codes, high, scale, x, x_total, n, m, is_token, acc, step,
    BLOCKS: tl.constexpr, KIND: tl.constexpr, BB: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """acc (BN, BM) plus the products of BB words of rows n (BN, 1) of a packed matrix with rows m (1, BM) of x.

    A step has word j of BB blocks where BB divides their number. Otherwise words are taken as they lie, j of all blocks
    before j + 1 of any, and a step may have some of both: only a row's last step is not full.
    """
    WORDS: tl.constexpr = 8 if KIND == "Q8_0" else 4
    if BLOCKS % BB == 0:
        j, b = step % WORDS, step // WORDS * BB + tl.arange(0, BB)
        number, word_at, is_word = j, j * BLOCKS + b, tl.full([BB], True, tl.int1)
    else:
        word_at = step * BB + tl.arange(0, BB)
        j, b, is_word = word_at // BLOCKS, word_at % BLOCKS, word_at < WORDS * BLOCKS
        number = j[None, :]  # of each word
    # Padding is not read: the same row again and again would be slow.
    there, given = is_word[None, :], is_word[:, None] & is_token
    word = tl.load(codes + n * (WORDS * BLOCKS) + word_at[None, :], there, other=0)
    w = tl.load(scale + n * BLOCKS + b[None, :], there, other=0)
    if scale.dtype.element_ty == tl.float16:
        w0, w1 = w, w
    else:
        w0, w1 = both_halves(w, PLAIN)
    x_at = x + m * (32 * BLOCKS) + (4 * j * BLOCKS + b)[:, None]  # (BB, BM)
    if has_totals(KIND):
        # A quarter of it with each of the four words.
        extra = w1 * (-0.25 if KIND == "Q4_K" else -2.0)
        acc = tl.dot(extra, tl.load(x_total + m * BLOCKS + b[:, None], given, other=0.0), acc)
        w_small = w0 * 0.0625
        for i in tl.static_range(4):
            low, upper = nibble_tiles(word, w0, w_small, i, PLAIN)
            acc = tl.dot(low, tl.load(x_at + i * BLOCKS, given, other=0.0), acc)
            acc = tl.dot(upper, tl.load(x_at + (16 + i) * BLOCKS, given, other=0.0), acc)
    else:
        h0, h1 = word, word
        if KIND == "Q6_K":
            h0 = tl.load(high + n * 2 * BLOCKS + b[None, :], there, other=0)
            h1 = tl.load(high + (n * 2 + 1) * BLOCKS + b[None, :], there, other=0)
        for i in tl.static_range(4):
            a = tile_values(word, h0, w0, w1, number, KIND, i, False, PLAIN)
            acc = tl.dot(a, tl.load(x_at + i * BLOCKS, given, other=0.0), acc)
            if WORDS == 4:
                a = tile_values(word, h1, w0, w1, number, KIND, i, True, PLAIN)
                v = tl.load(x_at + (16 + i) * BLOCKS, given, other=0.0)
                acc = tl.dot(a, v, acc)
    return acc


@triton.jit
def tile_products(
    codes, high, scale, x, x_total, n, m, is_token, acc, first, last,
    BLOCKS: tl.constexpr, KIND: tl.constexpr, BB: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Steps `first` to `last` (without it) of `tile_step`."""
    for step in range(first, last):
        acc = tile_step(codes, high, scale, x, x_total, n, m, is_token, acc, step, BLOCKS, KIND, BB, PLAIN)
    return acc


@triton.jit(do_not_specialize=["n_tokens"])
def _matmul(
    codes, high, scale, x, x_scale, x_total, residual, out, n_rows, n_tokens,
    BLOCKS: tl.constexpr, KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr,
    SPLITS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    let_next_start()
    wait()
    row, token = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.minimum(row, n_rows - 1).to(tl.int64)[:, None]
    m, is_token = token[None, :], (token < n_tokens)[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    split = tl.program_id(2)
    STEPS: tl.constexpr = n_steps(BLOCKS, KIND, BB)
    SHARE: tl.constexpr = tl.cdiv(STEPS, SPLITS)
    last = tl.minimum((split + 1) * SHARE, STEPS)
    acc = tile_products(
        codes, high, scale, x, x_total, n, m, is_token, acc, split * SHARE, last, BLOCKS, KIND, BB, PLAIN
    )
    acc *= tl.load(x_scale + m, is_token, other=0.0)
    at = token[None, :].to(tl.int64) * n_rows + row[:, None]
    ok = is_token & (row < n_rows)[:, None]
    if HAS_RESIDUAL:
        acc += tl.load(residual + at, ok & (split == 0), other=0.0)
    if SPLITS == 1:
        tl.store(out + at, acc, ok)
    else:  # onto zeros: of two addends the order does not matter, so that the result is always the same
        tl.atomic_add(out + at, acc, ok, sem="relaxed")


_MULTIPROCESSORS = 132  # of an H200; fewer programs share their columns out


@dataclass(frozen=True)
class Tile:
    """Weight rows and blocks of a program's tile, warps, pipeline stages; chosen by benchmarks/cuda_kernels.py."""

    rows: int
    blocks: int
    warps: int
    stages: int


def tile_for(weight: WeightPlanes, n_tokens: int) -> Tile:
    """Up to 16 tokens two warps, whose tensor-core instructions do not wait for each other; then warp groups."""
    is_tall = weight.n_rows >= 16384
    if weight.kind == "Q6_K":
        return Tile(64, 32, 2 if n_tokens <= 16 else 4, 2)
    if weight.kind == "Q8_0" and is_tall:
        return Tile(128, 32, 8, 3)
    if n_tokens <= 16:
        return Tile(64, 32, 2, 3) if weight.n_rows >= 6144 else Tile(32, 64, 2, 3)
    if is_tall and n_tokens > 32:
        return Tile(128, 32, 8, 2) if has_levels(weight.kind) else Tile(128, 16, 4, 3)
    # Shared memory for two programs where there is more than one for each multiprocessor.
    return Tile(64, 32, 4, 3 if is_tall or weight.n_rows <= 64 * _MULTIPROCESSORS // 2 else 2)


def fast_rows(weight: WeightPlanes) -> range:
    """Numbers of rows for which this is faster than `matvec` and than a product with a float16 copy of the matrix, as
    far as it was measured. `matvec` is as fast for a small matrix, of which it has more programs.
    """
    if not warpgroups.is_possible(weight):
        return range(0)
    is_small = weight.n_rows * weight.n_columns < 4096 * 4096
    return range(9 if is_small else 5, 65)


def matmul(
    weight: WeightPlanes,
    x: Rows,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """out (tokens, n_rows) float32 = x (tokens, n_columns) · weightᵀ (+ residual)."""
    assert weight.is_packed, weight.kind
    n_tokens = x.n_rows
    assert (x.form, x.n_columns) == (HALVES, weight.n_columns), "another form or width"
    assert out.shape == (n_tokens, weight.n_rows)
    assert out.dtype == torch.float32
    assert out.is_contiguous()
    if tile is None and warpgroups.is_possible(weight):
        warpgroups.warpgroup_matmul(weight, x, out, residual)
        return out
    tile = tile or tile_for(weight, n_tokens)
    tokens = min(64, max(16, triton.next_power_of_2(n_tokens)))
    n_programs = triton.cdiv(weight.n_rows, tile.rows) * triton.cdiv(n_tokens, tokens)
    splits = 2 if n_programs < _MULTIPROCESSORS else 1
    if splits > 1:
        assert residual is not out, "the residual is read while the sum is made"
        out.zero_()
    grid = triton.cdiv(weight.n_rows, tile.rows), triton.cdiv(n_tokens, tokens), splits
    launch(
        _matmul[grid],
        weight.codes, weight.codes if weight.high is None else weight.high, weight.scale,
        x.values, x.scale, x.total, out if residual is None else residual, out, weight.n_rows, n_tokens,
        BLOCKS=weight.n_columns // BLOCK, KIND=weight.kind, BM=tokens, BN=tile.rows, BB=tile.blocks,
        SPLITS=splits, HAS_RESIDUAL=residual is not None, PLAIN=INTERPRETED,
        num_warps=tile.warps, num_stages=tile.stages, **overlapping(),
    )  # fmt: skip
    return out
