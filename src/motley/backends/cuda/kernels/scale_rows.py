"""Results of the library's products as float32: out[m, n] = product[m, n] · scale[m] (+ residual[m, n]).

Reference: the same in torch, which takes two passes over memory and three times as long.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # columns of a program


@triton.jit
def _scale_rows(product, scale, residual, out, n_columns, BLOCK: tl.constexpr, ADDS: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, ok = row * n_columns + n, n < n_columns
    x = tl.load(product + at, ok, other=0.0).to(tl.float32) * tl.load(scale + row)
    if ADDS:
        x += tl.load(residual + at, ok, other=0.0)
    tl.store(out + at, x, ok)


def scale_rows(product: torch.Tensor, scale: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """product (rows, columns) of any float type, scale (rows,) → float32 (rows, columns)."""
    assert product.is_contiguous()
    assert residual is None or residual.is_contiguous()
    n_rows, n_columns = product.shape
    out = torch.empty(n_rows, n_columns, device=product.device)
    _scale_rows[(n_rows, triton.cdiv(n_columns, _BLOCK))](
        product, scale, out if residual is None else residual, out, n_columns,
        BLOCK=_BLOCK, ADDS=residual is not None, num_warps=4,
    )  # fmt: skip
    return out
