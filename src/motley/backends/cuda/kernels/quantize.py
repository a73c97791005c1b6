"""One head of one token as the cache stores it, plane by plane: what formats.planar does, for every type of cache.

    f32 f16 bf16   the value
    q8_0           s = max|x| / 127, c = round(x / s)
    q4_0, q5_0     s = x_far / -8 (-16), c = floor(x / s + 8.5 (16.5)); x_far has the largest magnitude of its tile
    q4_1, q5_1     m = min x, s = (max x - m) / 15 (31), c = floor((x - m) / s + 0.5)
    iq4_nl         s = x_far / -127, c the nearest of 16 levels l, then s = sum x l / sum l l

A tile with a NaN or an infinity has the scale NaN, so that attention over it is NaN: damage shows.
Codes of four and five bits: i shares a byte with i + 16; fifth bits are a string of bits. Reference:
kvcache.store.Store.write.
"""

from __future__ import annotations

import triton
import triton.language as tl

from motley.backends.cuda.kernels.rows import nan_if_damaged
from motley.backends.cuda.kernels.tiles import has_high_bits, has_minimum, is_plain


@triton.jit
def _round(x):
    """Rounds to the nearest whole number, ties away from zero."""
    size = tl.abs(x)
    whole = tl.floor(size)
    whole += tl.where(size - whole >= 0.5, 1.0, 0.0)
    return tl.where(x < 0, -whole, whole)


@triton.jit
def _inverse(s):
    return tl.where(tl.abs(s) > 1e-38, 1.0 / tl.where(tl.abs(s) > 1e-38, s, 1.0), 0.0)


@triton.jit
def _farthest(tiles):
    largest, smallest = tl.max(tiles, 1), tl.min(tiles, 1)
    return tl.where(largest >= -smallest, largest, smallest)


@triton.jit
def _fit(tiles, levels, KIND: tl.constexpr):
    """tiles (N, 32) → codes int32 (N, 32), scale (N,) and minimum (N,)."""
    minimum = tl.min(tiles, 1)
    if KIND == "iq4_nl":
        x = tiles * _inverse(_farthest(tiles) / -127.0)[:, None]
        codes = tl.zeros(tiles.shape, tl.int32)
        for i in tl.static_range(15):
            middle = (tl.load(levels + i) + tl.load(levels + i + 1)) / 2
            codes += (x >= middle).to(tl.int32)
        level = tl.load(levels + codes)
        return codes, tl.sum(tiles * level, 1) * _inverse(tl.sum(level * level, 1)), minimum
    MAX_CODE: tl.constexpr = 31.0 if has_high_bits(KIND) else 15.0
    if has_minimum(KIND):
        scale = (tl.max(tiles, 1) - minimum) / MAX_CODE
        x = (tiles - minimum[:, None]) * _inverse(scale)[:, None] + 0.5
    else:
        MIDDLE: tl.constexpr = (MAX_CODE + 1) / 2
        scale = _farthest(tiles) / -MIDDLE
        x = tiles * _inverse(scale)[:, None] + (MIDDLE + 0.5)
    return tl.clamp(tl.floor(x), 0.0, MAX_CODE).to(tl.int32), scale, minimum


@triton.jit
def store_head(
    x,
    planes,
    slot,
    head,
    head_rows,
    KIND: tl.constexpr,
    TILES: tl.constexpr,
    N: tl.constexpr,
    BS: tl.constexpr,
):
    """x (32 N,) as one token of one head row; of N tiles the first TILES are there."""
    tiles = tl.reshape(x, [N, 32])
    t, i = tl.arange(0, N), tl.arange(0, 32)[None, :]
    ok = t < TILES
    place = ((slot // BS) * head_rows + head) * TILES * BS + t * BS + slot % BS  # (tiles,)
    if is_plain(KIND):
        tl.store(planes[0] + place[:, None] * 32 + i, tiles.to(planes[0].dtype.element_ty), ok[:, None])
    elif KIND == "q8_0":
        s = tl.max(tl.abs(tiles), 1) / 127.0
        c = _round(tiles * _inverse(s)[:, None])
        tl.store(planes[0] + place[:, None] * 32 + i, c.to(tl.int8), ok[:, None])
        tl.store(planes[1] + place, nan_if_damaged(s, tiles).to(tl.float16), ok)
    else:
        c, s, minimum = _fit(tiles, planes[4], KIND)
        low, high = tl.split(tl.permute(tl.reshape(c & 15, [N, 2, 16]), (0, 2, 1)))
        byte = tl.arange(0, 16)[None, :]
        tl.store(planes[0] + place[:, None] * 16 + byte, (low | high << 4).to(tl.int8), ok[:, None])
        tl.store(planes[1] + place, nan_if_damaged(s, tiles).to(tl.float16), ok)
        if has_minimum(KIND):
            tl.store(planes[3] + place, minimum.to(tl.float16), ok)
        if has_high_bits(KIND):
            bits = tl.reshape(c >> 4, [N, 4, 8]) << tl.arange(0, 8)[None, None, :]
            four = tl.arange(0, 4)[None, :]
            tl.store(planes[2] + place[:, None] * 4 + four, tl.sum(bits, 2).to(tl.int8), ok[:, None])
