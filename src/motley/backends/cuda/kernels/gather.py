"""A sequence's K or V as plain float16 (heads, context, dim), for attention of many queries by the library.

Formulas and layouts are those of `tiles`. Reference: kvcache.store.Store.read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.bits import INTERPRETED
from motley.backends.cuda.kernels.tiles import (
    TILE,
    CachePlanes,
    dims,
    exact_parts,
    is_words,
    load_columns,
    load_scales,
    n_columns,
    n_parts,
    spread,
    unit,
    zero_code,
)


@triton.jit
def _gather(
    planes, blocks, out, n_tokens, head_rows, first_row,
    KIND: tl.constexpr, TILES: tl.constexpr, DIM: tl.constexpr, BS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    b, head = tl.program_id(0), tl.program_id(1)
    at = (tl.load(blocks + b).to(tl.int64) * head_rows + first_row + head,)
    x = load_columns(planes, at, KIND, TILES, BS)
    t, w = (b * BS + tl.arange(0, BS))[None, :], tl.arange(0, n_columns(KIND, TILES))[:, None]
    row = out + (head.to(tl.int64) * n_tokens + t) * DIM
    BYTES: tl.constexpr = 4 if is_words(KIND) else 1
    EACH: tl.constexpr = n_parts(KIND) // BYTES
    scale = x
    if is_words(KIND):
        scale = spread(load_scales(planes, at, KIND, TILES, BS), KIND).to(tl.float32)
    for i in tl.static_range(BYTES):
        parts = exact_parts(x, i, KIND, PLAIN)
        for j in tl.static_range(EACH):
            value = parts[j]
            if is_words(KIND):
                code = value.to(tl.float32) * (2.0**24 / unit(i * EACH + j, KIND))
                value = ((code - zero_code(KIND)) * scale).to(tl.float16)
            d = dims(w, i * EACH + j, KIND)
            tl.store(row + d, value, (t < n_tokens) & (d < DIM))


def gather(
    planes: CachePlanes, head_rows: slice, blocks: torch.Tensor, n_tokens: int, dim: int | None = None
) -> torch.Tensor:
    """The first `n_tokens` of `blocks` (int32) → float16 (heads, tokens, dim); all tiles' dims unless told."""
    n_heads, size = head_rows.stop - head_rows.start, planes.block_size
    dim = dim or planes.n_tiles * TILE
    assert len(blocks) * size >= n_tokens
    assert blocks.dtype == torch.int32
    out = torch.empty(n_heads, n_tokens, dim, dtype=torch.float16, device=planes.codes.device)
    _gather[(len(blocks), n_heads)](
        planes.pointers, blocks, out, n_tokens, planes.codes.shape[1], head_rows.start,
        KIND=planes.kind, TILES=planes.n_tiles, DIM=dim, BS=size, PLAIN=INTERPRETED, num_warps=4,
    )  # fmt: skip
    return out
