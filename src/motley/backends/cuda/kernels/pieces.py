"""Pieces of a long context for the library's attention (`library_attention`): unpacked to float16, and results joined.

    unpack   packed, paged blocks → (KV heads, tokens, dim)
    join     out · 2^(sum - new) + piece · 2^(piece's sum - new), new = log₂(2^sum + 2^(piece's sum))

Values that are stored rotated are rotated back where they are joined. Reference: graph.ops.Attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.bits import INTERPRETED
from motley.backends.cuda.kernels.hadamard import rotated
from motley.backends.cuda.kernels.prefill import load_block, n_dims, order_of
from motley.backends.cuda.kernels.tiles import CachePlanes

_LOG2E = tl.constexpr(1.4426950408889634)
_HEADS = 4  # of a program that joins


@triton.jit(do_not_specialize=["first_block", "head_rows", "first_row", "n_tokens"])
def _unpack_block(
    planes, table, out, first_block, head_rows, first_row, n_tokens,
    KIND: tl.constexpr, DIM: tl.constexpr, BS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    b, head = tl.program_id(0), tl.program_id(1)
    TILES: tl.constexpr = (DIM + 31) // 32
    DIMS: tl.constexpr = n_dims(KIND, TILES)
    at = tl.load(table + first_block + b).to(tl.int64) * head_rows + first_row + head
    x = load_block(planes, (at,), KIND, TILES, BS, PLAIN)  # (dims, tokens)
    d = order_of(tl.arange(0, DIMS), KIND)[:, None]
    t = (head.to(tl.int64) * n_tokens + b * BS + tl.arange(0, BS))[None, :]
    tl.store(out + t * DIM + d, x.to(tl.float16), (d < DIM) & (t >= 0))


def unpack_piece(
    planes: CachePlanes, head_rows: slice, table: torch.Tensor, first_block: int, out: torch.Tensor
) -> torch.Tensor:
    """out (KV heads, tokens, dim) float16 from the blocks `first_block` … of `table` (int32 ids)."""
    n_heads, n_tokens, dim = out.shape
    assert out.is_contiguous()
    assert n_tokens % planes.block_size == 0
    _unpack_block[(n_tokens // planes.block_size, n_heads)](
        planes.pointers, table, out, first_block, planes.codes.shape[1], head_rows.start, n_tokens,
        KIND=planes.kind, DIM=dim, BS=planes.block_size, PLAIN=INTERPRETED, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["n_heads", "n_piece_rows"])
def _join_piece(
    out, sums, piece, piece_sums, n_heads, n_piece_rows,
    DIM: tl.constexpr, HEADS: tl.constexpr, ROTATION: tl.constexpr, LOG_ROTATION: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside, d = head < n_heads, tl.arange(0, DIM)[None, :]
    old = tl.load(sums + row * n_heads + head, inside, other=0.0)
    own = tl.load(piece_sums + head * n_piece_rows + row, inside, other=0.0) * _LOG2E  # (heads, rows)
    top = tl.maximum(old, own)
    a, b = tl.exp2(old - top), tl.exp2(own - top)
    place, mask = (row * n_heads + head)[:, None] * DIM + d, inside[:, None] & (d >= 0)
    x = tl.load(piece + place, mask, other=0.0).to(tl.float32)
    if ROTATION > 1:
        ALL: tl.constexpr = HEADS * DIM
        x = tl.reshape(rotated(tl.reshape(x, [ALL]), ALL, ROTATION, LOG_ROTATION), [HEADS, DIM])
    y = tl.load(out + place, mask, other=0.0)
    tl.store(out + place, (y * a[:, None] + x * b[:, None]) / (a + b)[:, None], mask)
    tl.store(sums + row * n_heads + head, top + tl.log2(a + b), inside)


def join_piece(
    out: torch.Tensor, sums: torch.Tensor, piece: torch.Tensor, piece_sums: torch.Tensor, rotation: int
) -> None:
    """Add a piece of the context to out (rows, heads, dim) float32 and sums (rows, heads), log₂ as `prefill` has them.

    `piece` (more rows, heads, dim) float16, `piece_sums` (heads, these rows) with natural logarithms. `rotation`: of
    the piece, to be undone; 1: none.
    """
    n_rows, n_heads, dim = out.shape
    assert out.is_contiguous()
    assert sums.is_contiguous()
    assert piece.is_contiguous()
    assert piece_sums.is_contiguous()
    assert piece.shape[1:] == out.shape[1:]
    assert piece_sums.shape == piece.shape[1::-1]
    _join_piece[(n_rows, triton.cdiv(n_heads, _HEADS))](
        out, sums, piece, piece_sums, n_heads, len(piece),
        DIM=dim, HEADS=_HEADS, ROTATION=rotation, LOG_ROTATION=rotation.bit_length() - 1, num_warps=1,
    )  # fmt: skip
