"""Rows of a packed matrix as plain numbers: all of them once for a large product, or chosen ones (embeddings).

By value, as `rows.HALVES`: value i of all blocks of 32 before value i + 1 of any, so that loads and stores are runs;
a product over columns does not mind their order. Chosen rows are written in their natural order.
Reference: PackedTensor.unpack, PackedTensor.rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.bits import INTERPRETED, high_half, low_half
from motley.backends.cuda.kernels.matmul import tile_values
from motley.backends.cuda.planes import BLOCK, WeightPlanes


@triton.jit(do_not_specialize=["n_rows"])
def _unpack(
    codes, high, scale, row_ids, out, n_rows,
    BLOCKS: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr,
    CHOOSES: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = 8 if KIND == "Q8_0" else 4
    row, b = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(2) * BB + tl.arange(0, BB)[None, :]
    j = tl.program_id(1)
    is_row = row < n_rows
    ok = is_row[:, None] & (b < BLOCKS)
    n = row.to(tl.int64)[:, None]
    target = out + n * BLOCKS * 32
    if CHOOSES:  # -1: a row of zeros
        n = tl.load(row_ids + row, is_row, other=-1).to(tl.int64)[:, None]
    known = ok & (n >= 0)
    word = tl.load(codes + (n * WORDS + j) * BLOCKS + b, known, other=0)
    w = tl.load(scale + n * BLOCKS + b, known, other=0)
    if scale.dtype.element_ty == tl.float16:
        w0, w1 = w, w
    else:
        w0, w1 = low_half(w), high_half(w)
    h0, h1 = word, word
    if KIND == "Q6_K":
        h0 = tl.load(high + n * 2 * BLOCKS + b, known, other=0)
        h1 = tl.load(high + (n * 2 + 1) * BLOCKS + b, known, other=0)
    for part in tl.static_range(32 // WORDS):
        h = h0 if part < 4 else h1
        v = tile_values(word, h, w0, w1, j, KIND, part % 4, part >= 4, PLAIN)
        i = 4 * j + part % 4 + part // 4 * 16
        if CHOOSES:
            tl.store(target + b * 32 + i, v.to(tl.float32), ok)
        else:
            tl.store(target + i * BLOCKS + b, v, ok)


def unpack_by_value(weight: WeightPlanes, out: torch.Tensor) -> torch.Tensor:
    """Unpacks all rows → out (n_rows, n_columns) float16, columns by value."""
    assert out.shape == (weight.n_rows, weight.n_columns)
    assert out.dtype == torch.float16
    return _launch(weight, None, out, BN=4, BB=128)


def unpack_rows(weight: WeightPlanes, row_ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Rows `row_ids` (n,) int32 → out (n, n_columns) float32; zeros for an id of -1."""
    assert out.shape == (len(row_ids), weight.n_columns)
    assert out.dtype == torch.float32
    return _launch(weight, row_ids, out, BN=1, BB=128)


def _launch(
    weight: WeightPlanes, row_ids: torch.Tensor | None, out: torch.Tensor, BN: int, BB: int
) -> torch.Tensor:
    assert weight.is_packed, weight.kind
    assert out.is_contiguous()
    n_words, n_blocks = 8 if weight.kind == "Q8_0" else 4, weight.n_columns // BLOCK
    _unpack[(triton.cdiv(out.shape[0], BN), n_words, triton.cdiv(n_blocks, BB))](
        weight.codes, weight.codes if weight.high is None else weight.high, weight.scale,
        weight.codes if row_ids is None else row_ids, out, out.shape[0],
        BLOCKS=n_blocks, KIND=weight.kind, BN=BN, BB=BB,
        CHOOSES=row_ids is not None, PLAIN=INTERPRETED, num_warps=4 if BN > 1 else 1,
    )  # fmt: skip
    return out
