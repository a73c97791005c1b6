"""Join what the splits of `attention` left: out = Σ 2^(peak_s - peak) · values_s / Σ 2^(peak_s - peak) · sum_s.

With `rotate`, the result is turned back by the Hadamard matrix, of the whole head or of runs of it: quantized values
are stored turned.
The output is INT8 (for a product with one row) or PLAIN. Reference: the last steps of graph.ops.Attention.
"""

from __future__ import annotations

import triton
import triton.language as tl

from motley.backends.cuda.kernels.attention import Shares, Tables
from motley.backends.cuda.kernels.hadamard import turned
from motley.backends.cuda.kernels.rows import HALVES, PLAIN, Rows, convert, store_rows
from motley.backends.cuda.kernels.tiles import TILE


@triton.jit
def _combine(
    shares, peaks, sums, row_table, row_position, firsts, values, scale, total, window, n_splits, min_blocks,
    DIM: tl.constexpr, TURN: tl.constexpr, LOG_TURN: tl.constexpr, BS: tl.constexpr, SPLITS: tl.constexpr,
    HEADS: tl.constexpr, ROTATE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, position = tl.load(firsts + tl.load(row_table + row)), tl.load(row_position + row)
    start = (tl.maximum(position - window + 1, first) - first) // BS
    n_blocks = (position - first) // BS + 1 - start
    n_used = tl.cdiv(n_blocks, tl.maximum(tl.cdiv(n_blocks, n_splits), min_blocks))
    D: tl.constexpr = triton.next_power_of_2(DIM)
    base, d = (row * HEADS + head) * n_splits, tl.arange(0, D)
    top, weight, acc = -float("inf"), 0.0, tl.zeros([D], tl.float32)
    for s0 in range(0, n_used, SPLITS):
        s = s0 + tl.arange(0, SPLITS)
        peak = tl.load(peaks + base + s, s < n_used, other=-float("inf"))
        new_top = tl.maximum(top, tl.max(peak, 0))
        factor, fade = tl.exp2(peak - new_top), tl.exp2(top - new_top)
        ok = (s < n_used)[:, None] & (d < DIM)[None, :]
        part = tl.load(shares + (base + s)[:, None] * DIM + d[None, :], ok, other=0.0)
        acc = acc * fade + tl.sum(part * factor[:, None], 0)
        weight = weight * fade + tl.sum(tl.load(sums + base + s, s < n_used, other=0.0) * factor, 0)
        top = new_top
    x = acc / weight
    if ROTATE:
        x = turned(x, D, TURN, LOG_TURN)
    if DIM % 32:  # heads do not start with blocks
        tl.store(values + (row * HEADS + head) * DIM + d, x, d < DIM)
    else:
        tile = tl.arange(0, D // 32)
        b = tl.where(tile < DIM // 32, head * (DIM // 32) + tile, HEADS * DIM // 32)
        store_rows(tl.reshape(x, [D // 32, 32]), values, scale, total, row, b, HEADS * DIM // 32, FORM)


def combine(
    shares: Shares,
    tables: Tables,
    block_size: int,
    out: Rows,
    *,
    rotate: bool,
    turn: int | None = None,
    window: int | None = None,
) -> Rows:
    """→ out (rows, heads · dim). `turn`: the size of the rotation, where it is not the head's."""
    n_rows, n_heads, n_splits, dim = shares.values.shape
    assert out.form != HALVES, "a program has one head, not the whole row"
    assert (out.n_rows, out.n_columns) == (n_rows, n_heads * dim)
    turn = (turn or dim) if rotate else 1
    assert dim % turn == turn & (turn - 1) == 0, "only powers of two have a Hadamard matrix"
    if dim % TILE and out.form != PLAIN:
        plain = Rows.empty(PLAIN, out.n_rows, out.n_columns, out.values.device)
        combine(shares, tables, block_size, plain, rotate=rotate, turn=turn, window=window)
        return convert(plain.values, out)
    n_at_once, n_warps = (32, 1) if n_splits <= 64 else (128, 4)  # measured: benchmarks/cuda_kernels.py
    _combine[(n_rows, n_heads)](
        shares.values, shares.peaks, shares.sums, tables.row_table, tables.row_position, tables.firsts,
        out.bytes_or_values, out.scale, out.total, window or 2**30, n_splits, shares.min_blocks,
        DIM=dim, TURN=turn, LOG_TURN=turn.bit_length() - 1, BS=block_size,
        SPLITS=min(n_at_once, triton.next_power_of_2(n_splits)),
        HEADS=n_heads, ROTATE=rotate, FORM=out.form, num_warps=n_warps,
    )  # fmt: skip
    return out
