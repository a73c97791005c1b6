"""The gated norm of recurrent layers: out = RmsNorm(x) · weight · silu(gate), for each head of each row.

The output is INT8 (for a product with one row) or PLAIN. Reference: graph.ops.RmsNorm, graph.ops.Activation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.overlap import let_next_start, overlapping, wait
from motley.backends.cuda.kernels.rows import HALVES, Rows, store_rows


@triton.jit(do_not_specialize=["gate_stride"])
def _gated_norm(
    x, gate, weight, values, scale, total, eps, gate_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, TILES: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    let_next_start()
    tile = tl.arange(0, TILES)
    d, inside = tile[:, None] * 32 + tl.arange(0, 32)[None, :], (tile < DIM // 32)[:, None]
    w = tl.load(weight + d, inside, other=0.0)
    wait()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = tl.load(x + (row * HEADS + head) * DIM + d, inside, other=0.0)
    g = tl.load(gate + row * gate_stride + head * DIM + d, inside, other=0.0)
    v = v * tl.rsqrt(tl.sum(tl.sum(v * v, 1), 0) / DIM + eps) * w * (g / (1.0 + tl.exp(-g)))
    b = tl.where(tile < DIM // 32, head * (DIM // 32) + tile, HEADS * (DIM // 32))
    store_rows(v, values, scale, total, row, b, HEADS * (DIM // 32), FORM)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, out: Rows) -> Rows:
    """x and gate (rows, heads, dim) float32, each row of gate contiguous; weight (dim,) → out (rows, heads · dim)."""
    n_rows, n_heads, dim = x.shape
    assert x.is_contiguous()
    assert gate.shape == x.shape
    assert gate.stride()[1:] == (dim, 1)
    assert out.form != HALVES, "a program has one head, not the whole row"
    _gated_norm[(n_rows, n_heads)](
        x, gate, weight, out.bytes_or_values, out.scale, out.total, eps, gate.stride(0),
        HEADS=n_heads, DIM=dim, TILES=triton.next_power_of_2(dim // 32), FORM=out.form, num_warps=1, **overlapping(),
    )  # fmt: skip
    return out
