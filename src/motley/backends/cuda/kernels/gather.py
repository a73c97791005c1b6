"""A sequence's K or V as plain float16 (heads, context, dim), for attention of many queries by the library.

The formula and the layout are those of `attention`. Reference: kvcache.store.Store.read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.attention import (
    CachePlanes,
    dims,
    load_tile,
    n_parts,
    operand,
    part_width,
    unit,
)
from motley.backends.cuda.kernels.bits import INTERPRETED


@triton.jit
def _gather(
    codes, scale, blocks, out, n_tokens, head_rows, first_row,
    KIND: tl.constexpr, DIM: tl.constexpr, BS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    b, head = tl.program_id(0), tl.program_id(1)
    W: tl.constexpr = part_width(KIND, DIM)
    at = tl.load(blocks + b).to(tl.int64) * head_rows + first_row + head
    x, s = load_tile(codes, scale, at, KIND, W, BS, DIM, BY_COLUMN=False)
    t, w = b * BS + tl.arange(0, BS), tl.arange(0, W)
    ok = (t < n_tokens)[:, None] & (w < DIM // n_parts(KIND))[None, :]
    row = out + (head.to(tl.int64) * n_tokens + t)[:, None] * DIM
    for i in tl.static_range(n_parts(KIND)):
        value = operand(x, s, i, KIND, PLAIN) * unit(i, KIND)
        tl.store(row + dims(w, i, KIND)[None, :], value.to(tl.float16), ok)


def gather(planes: CachePlanes, head_rows: slice, blocks: torch.Tensor, n_tokens: int) -> torch.Tensor:
    """The first `n_tokens` of `blocks` (int32) → float16 (heads, tokens, dim)."""
    n_heads, n_tiles, size = head_rows.stop - head_rows.start, planes.codes.shape[2], planes.codes.shape[3]
    assert len(blocks) * size >= n_tokens
    assert blocks.dtype == torch.int32
    out = torch.empty(n_heads, n_tokens, n_tiles * 32, dtype=torch.float16, device=planes.codes.device)
    _gather[(len(blocks), n_heads)](
        planes.codes, planes.scale, blocks, out, n_tokens, planes.codes.shape[1], head_rows.start,
        KIND=planes.kind, DIM=n_tiles * 32, BS=size, PLAIN=INTERPRETED, num_warps=4,
    )  # fmt: skip
    return out
