"""Rows of Q4_K as they lie in a file → planes, in one pass: for experts that are copied for one batch.

A superblock of 256 values has 36 words: two float16 (scale, minimum), 12 bytes of eight 6-bit pairs, and 128 bytes of
codes. Blocks 2i and 2i + 1 of it have the low and the high nibbles of bytes 32i … 32i + 31.
Reference: planes.to_planes, which takes a dozen passes over memory; the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from motley.backends.cuda.planes import BLOCK, WeightPlanes

_AT_ONCE = 256  # blocks of a program
_WORDS = 36  # of a superblock
_HALF_MAX = tl.constexpr(65504.0)


@triton.jit(do_not_specialize=["n_blocks"])
def _repack_q4_k(words, halves, codes, scales, n_blocks, PER_ROW: tl.constexpr, AT_ONCE: tl.constexpr):
    block = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    ok = block < n_blocks
    above, g = (block // 8).to(tl.int64), block % 8  # superblock, and the block's number in it
    start = words + above * 36
    a = tl.load(start + 1, ok, other=0)
    b = tl.load(start + 2, ok, other=0)
    c = tl.load(start + 3, ok, other=0)
    shift = 8 * (g % 4)
    is_low = g < 4
    upper_a, upper_b = ((a >> (shift + 6)) & 3) << 4, ((b >> (shift + 6)) & 3) << 4
    factor = tl.where(is_low, (a >> shift) & 63, ((c >> shift) & 15) | upper_a)
    offset = tl.where(is_low, (b >> shift) & 63, ((c >> (shift + 4)) & 15) | upper_b)
    scale = tl.load(halves + above * 72, ok, other=0.0).to(tl.float32) * factor.to(tl.float32)
    minimum = tl.load(halves + above * 72 + 1, ok, other=0.0).to(tl.float32) * offset.to(tl.float32)
    scale = tl.minimum(tl.maximum(scale, -_HALF_MAX), _HALF_MAX)
    minimum = tl.minimum(tl.maximum(minimum, -_HALF_MAX), _HALF_MAX)
    tl.store(scales + block.to(tl.int64) * 2, scale.to(tl.float16), ok)
    tl.store(scales + block.to(tl.int64) * 2 + 1, minimum.to(tl.float16), ok)
    row, within = (block // PER_ROW).to(tl.int64), block % PER_ROW
    is_even = g % 2 == 0
    for j in tl.static_range(4):
        first = tl.load(start + 4 + g // 2 * 8 + j, ok, other=0)  # values 4j … of both blocks
        second = tl.load(start + 8 + g // 2 * 8 + j, ok, other=0)  # values 16 + 4j …
        even = (first & 0x0F0F0F0F) | ((second & 0x0F0F0F0F) << 4)
        odd = ((first >> 4) & 0x0F0F0F0F) | (second & -252645136)  # 0xF0F0F0F0
        tl.store(codes + (row * 4 + j) * PER_ROW + within, tl.where(is_even, even, odd), ok)


def can_repack(format_name: str) -> bool:
    return format_name == "Q4_K"


def repack(rows: torch.Tensor, planes: WeightPlanes) -> None:
    """rows (n, bytes) uint8 of Q4_K on the device → `planes` of n rows, written in place."""
    n_rows, n_columns = planes.n_rows, planes.n_columns
    assert planes.kind == "Q4_K"
    assert planes.scale is not None
    assert rows.is_contiguous()
    assert planes.codes.is_contiguous()
    assert planes.scale.is_contiguous()
    assert rows.shape == (n_rows, n_columns // 256 * 4 * _WORDS), (rows.shape, n_rows, n_columns)
    n_blocks = n_rows * n_columns // BLOCK
    if not n_blocks:
        return
    _repack_q4_k[(triton.cdiv(n_blocks, _AT_ONCE),)](
        rows.view(torch.int32), rows.view(torch.float16), planes.codes, planes.scale.view(torch.float16),
        n_blocks, PER_ROW=n_columns // BLOCK, AT_ONCE=_AT_ONCE, num_warps=4,
    )  # fmt: skip
