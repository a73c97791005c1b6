"""Join what the splits of `attention` left: out = Σ 2^(peak_s - peak) · values_s / Σ 2^(peak_s - peak) · sum_s.

With sinks, the sum has one more addend for each head, 2^(sink - peak), which has no value.
With `rotate`, the result is rotated back by the Hadamard matrix, of the whole head or of runs of it: quantized values
are stored rotated.
The output is INT8, PLAIN, or HALVES of a fixed scale. Reference: the last steps of graph.ops.Attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.attention import Shares, Tables, with_sink
from motley.backends.cuda.kernels.hadamard import rotated
from motley.backends.cuda.kernels.overlap import let_next_start, overlapping, wait
from motley.backends.cuda.kernels.rows import HALVES, PLAIN, Rows, convert, store_rows
from motley.backends.cuda.kernels.tiles import TILE


@triton.jit(do_not_specialize=["window", "n_splits", "min_blocks", "most_rows"])
def _combine(
    shares, peaks, sums, sinks, bundle_table, bundle_position, bundle_row, bundle_count, firsts, values, scale, total,
    window, n_splits, min_blocks, most_rows,
    DIM: tl.constexpr, ROTATION: tl.constexpr, LOG_ROTATION: tl.constexpr, BS: tl.constexpr, SPLITS: tl.constexpr,
    HEADS: tl.constexpr, ROTATE: tl.constexpr, FORM: tl.constexpr, FIXED: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    let_next_start()
    bundle, i, head = tl.program_id(0) // most_rows, tl.program_id(0) % most_rows, tl.program_id(1)
    row = tl.load(bundle_row + bundle, most_rows > 1, other=bundle)
    count = tl.load(bundle_count + bundle, most_rows > 1, other=1)
    row = (row + i).to(tl.int64)
    first, position = tl.load(firsts + tl.load(bundle_table + bundle)), tl.load(bundle_position + bundle)
    start = (tl.maximum(position - window + 1, first) - first) // BS
    n_blocks = (position + count - 1 - first) // BS + 1 - start
    n_used = tl.cdiv(n_blocks, tl.maximum(tl.cdiv(n_blocks, n_splits), min_blocks))
    D: tl.constexpr = triton.next_power_of_2(DIM)
    base, d = (row * HEADS + head) * n_splits, tl.arange(0, D)
    wait()  # not for tables, which are there before the first kernel of a batch starts
    if i >= count:
        return
    top, weight, acc = -float("inf"), 0.0, tl.zeros([D], tl.float32)
    for s0 in range(0, n_used, SPLITS):
        s = s0 + tl.arange(0, SPLITS)
        peak = tl.load(peaks + base + s, s < n_used, other=-float("inf"))
        new_top = tl.maximum(top, tl.max(peak, 0))
        factor, rescale = tl.exp2(peak - new_top), tl.exp2(top - new_top)
        ok = (s < n_used)[:, None] & (d < DIM)[None, :]
        part = tl.load(shares + (base + s)[:, None] * DIM + d[None, :], ok, other=0.0)
        acc = acc * rescale + tl.sum(part * factor[:, None], 0)
        weight = weight * rescale + tl.sum(tl.load(sums + base + s, s < n_used, other=0.0) * factor, 0)
        top = new_top
    if HAS_SINKS:
        rescale, weight = with_sink(weight, top, tl.load(sinks + head))
        acc *= rescale
    x = acc / weight
    if ROTATE:
        x = rotated(x, D, ROTATION, LOG_ROTATION)
    if DIM % 32:  # heads do not start with blocks
        tl.store(values + (row * HEADS + head) * DIM + d, x, d < DIM)
    else:
        tile = tl.arange(0, D // 32)
        b = tl.where(tile < DIM // 32, head * (DIM // 32) + tile, HEADS * DIM // 32)
        store_rows(tl.reshape(x, [D // 32, 32]), values, scale, total, row, b, HEADS * DIM // 32, FORM, FIXED)


def combine(
    shares: Shares,
    tables: Tables,
    block_size: int,
    out: Rows,
    *,
    rotate: bool,
    rotation: int | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> Rows:
    """→ out (rows, heads · dim). `rotation`: the size of the rotation, where it is not the head's. `sinks`: (heads,)"""
    n_rows, n_heads, n_splits, dim = shares.values.shape
    most_rows = tables.most_rows
    assert out.form != HALVES or out.fixed, "a program has one head, not the whole row"
    assert (out.n_rows, out.n_columns) == (n_rows, n_heads * dim)
    rotation = (rotation or dim) if rotate else 1
    assert dim % rotation == rotation & (rotation - 1) == 0, "only powers of two have a Hadamard matrix"
    if dim % TILE and out.form != PLAIN:
        plain = Rows.empty(PLAIN, out.n_rows, out.n_columns, out.values.device)
        combine(
            shares, tables, block_size, plain, rotate=rotate, rotation=rotation, window=window, sinks=sinks
        )
        return convert(plain.values, out)
    # Measured: benchmarks/cuda_kernels.py. Few sizes, as each is a compiled variant; one for all bundles.
    n_at_once, n_warps = (4, 1) if n_splits <= 4 else (32, 1) if n_splits <= 64 else (128, 4)
    if most_rows > 1:
        n_at_once, n_warps = 32, 1
    _combine[(len(tables.table) * most_rows, n_heads)](
        shares.values, shares.peaks, shares.sums, shares.sums if sinks is None else sinks,
        tables.table, tables.position, *tables.rows_and_counts, tables.firsts,
        out.bytes_or_values, out.scale, out.total, window or 2**30, n_splits, shares.min_blocks, most_rows,
        DIM=dim, ROTATION=rotation, LOG_ROTATION=rotation.bit_length() - 1, BS=block_size,
        SPLITS=n_at_once,
        HEADS=n_heads, ROTATE=rotate, FORM=out.form, FIXED=out.fixed, HAS_SINKS=sinks is not None,
        num_warps=n_warps, **overlapping(),
    )  # fmt: skip
    return out
