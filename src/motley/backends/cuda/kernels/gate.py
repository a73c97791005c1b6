"""A gated unit: out = f(gate) · up, in any form of `rows`; gate and up are the two halves of each row of `x`.

Reference: graph.ops.Mul of graph.ops.Activation.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.overlap import let_next_start, overlapping, wait
from motley.backends.cuda.kernels.rows import Rows, store_rows, tile_of
from motley.backends.cuda.support import GATE_FUNCTIONS


@triton.jit
def _gated(
    x, values, scale, total, BLOCKS: tl.constexpr, BB: tl.constexpr, FORM: tl.constexpr, FUNCTION: tl.constexpr
):  # fmt: skip
    let_next_start()
    wait()
    row, b = tl.program_id(0).to(tl.int64), tl.program_id(1) * BB + tl.arange(0, BB)
    k, inside = b[:, None] * 32 + tl.arange(0, 32)[None, :], (b < BLOCKS)[:, None]
    gate = tl.load(x + row * 2 * BLOCKS * 32 + k, inside, other=0.0)
    up = tl.load(x + (row * 2 + 1) * BLOCKS * 32 + k, inside, other=0.0)
    if FUNCTION == "silu":
        gate = gate / (1.0 + tl.exp(-gate))
    else:  # x · σ(2 z) = x · (1 + tanh z) / 2
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1.0 + tl.exp(-2.0 * z))
    store_rows(gate * up, values, scale, total, row, b, BLOCKS, FORM)


def gated(x: torch.Tensor, function: str, out: Rows) -> Rows:
    """x (rows, 2 · columns) float32 → `out` (rows, columns)."""
    assert function in GATE_FUNCTIONS, function
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    assert x.shape == (out.n_rows, 2 * out.n_columns)
    n_blocks = out.n_columns // 32
    blocks, warps = tile_of(out.form, n_blocks)
    _gated[(out.n_rows, triton.cdiv(n_blocks, blocks))](
        x, out.bytes_or_values, out.scale, out.total,
        BLOCKS=n_blocks, BB=blocks, FORM=out.form, FUNCTION=function, num_warps=warps, **overlapping(),
    )  # fmt: skip
    return out
