"""Root mean square norm: out = x / sqrt(mean(x²) + eps) · weight, in any form of `rows`.

x may come as two addends, whose sum is then stored, too. No value is larger than sqrt(columns) times its weight, so
that halves have a fixed scale. Reference: graph.ops.RmsNorm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.overlap import let_next_start, overlapping, wait
from motley.backends.cuda.kernels.rows import Rows, store_rows


@triton.jit
def _rms_norm(
    x, added, summed, weight, values, scale, total, row_ids, eps,
    BLOCKS: tl.constexpr, BB: tl.constexpr, FORM: tl.constexpr, FIXED: tl.constexpr, CHOOSES: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    let_next_start()
    row, b = tl.program_id(0).to(tl.int64), tl.arange(0, BB)
    k, inside = b[:, None] * 32 + tl.arange(0, 32)[None, :], (b < BLOCKS)[:, None]
    scales = tl.load(weight + k, inside, other=0.0)
    wait()
    source = row
    if CHOOSES:
        source = tl.load(row_ids + row).to(tl.int64)
    at = source * BLOCKS * 32 + k
    v = tl.load(x + at, inside, other=0.0)
    if ADDS:
        v += tl.load(added + at, inside, other=0.0)
        tl.store(summed + at, v, inside)
    mean = tl.sum(tl.sum(v * v, 1), 0) / (BLOCKS * 32)
    v = v * tl.rsqrt(mean + eps) * scales
    store_rows(v, values, scale, total, row, b, BLOCKS, FORM, FIXED)


def scale_of(n_columns: int) -> int:
    """The power of two from sqrt(columns) on: after division by it, only a weight above 65,504 could overflow."""
    return 1 << ((n_columns - 1).bit_length() + 1 >> 1)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: Rows,
    row_ids: torch.Tensor | None = None,
    added: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Rows:
    """x (rows, columns) float32, weight (columns,) → `out`; of the rows `row_ids` only, where given.

    `added`: what is added to x before, and where the sum is stored.
    """
    assert added is None or row_ids is None, "not all rows of the sum would be there"
    assert x.dtype == weight.dtype == torch.float32
    assert x.is_contiguous()
    assert x.shape[1] == out.n_columns == len(weight), "widths differ"
    n_blocks = out.n_columns // 32
    blocks = triton.next_power_of_2(n_blocks)
    _rms_norm[(out.n_rows,)](
        x, *(added or (x, x)), weight, out.bytes_or_values, out.scale, out.total,
        x if row_ids is None else row_ids, eps,
        BLOCKS=n_blocks, BB=blocks, FORM=out.form, FIXED=out.fixed, CHOOSES=row_ids is not None,
        ADDS=added is not None, num_warps=max(1, min(16, blocks // 8)), **overlapping(),
    )  # fmt: skip
    return out
