"""Queries, keys and values on their way into attention: rotary positions, the Hadamard rotation, and the cache.

One program for a token's head. Queries: turned by position, then (quantized keys) by H → q. Keys: the same → cache.
Values: by H where they are quantized → cache. Quantization is kvcache's, plane by plane (formats.planar):

    q8_0  s = max|x| / 127, c = round(x / s)      q4_0  s = x_far / -8, c = floor(x / s + 8.5), at most 15

where x_far has the largest magnitude of its 32 dims. A slot of -1 stores nothing.
Reference: graph.ops.Rope, graph.ops.Hadamard, kvcache.store.Store.write.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.attention import CachePlanes
from motley.backends.cuda.kernels.hadamard import hadamard


@triton.jit
def _rope(
    x, at, position, frequencies, magnitude, DIM: tl.constexpr, N_DIMS: tl.constexpr, HALVES: tl.constexpr
):
    """x[at + 0 … DIM] turned by position; the partner of a dim is read again, from memory."""
    d = tl.arange(0, DIM)
    v = tl.load(x + at + d)
    turned = d < N_DIMS
    if HALVES:
        is_first, pair = d < N_DIMS // 2, d % (N_DIMS // 2)
        partner = tl.where(is_first, d + N_DIMS // 2, d - N_DIMS // 2)
    else:
        is_first, pair, partner = d % 2 == 0, d // 2, d ^ 1
    angle = position.to(tl.float32) * tl.load(frequencies + pair, turned, other=0.0)
    other = tl.load(x + at + partner, turned, other=0.0)
    sine = tl.where(is_first, -tl.sin(angle), tl.sin(angle))
    return tl.where(turned, (v * tl.cos(angle) + other * sine) * magnitude, v)


@triton.jit
def _round(x):
    """To the nearest whole number, ties away from zero."""
    size = tl.abs(x)
    whole = tl.floor(size)
    whole += tl.where(size - whole >= 0.5, 1.0, 0.0)
    return tl.where(x < 0, -whole, whole)


@triton.jit
def _store(x, codes, scale, slot, head, head_rows, KIND: tl.constexpr, DIM: tl.constexpr, BS: tl.constexpr):
    """x (DIM,) as one token of one head row."""
    TILES: tl.constexpr = DIM // 32
    tiles = tl.reshape(x, [TILES, 32])
    t = tl.arange(0, TILES)
    place = ((slot // BS) * head_rows + head) * TILES * BS + t * BS + slot % BS  # (tiles,)
    i = tl.arange(0, 32)[None, :]
    if KIND == "f16":
        tl.store(codes + place[:, None] * 32 + i, tiles.to(tl.float16))
    elif KIND == "q8_0":
        s = tl.max(tl.abs(tiles), 1) / 127.0
        c = _round(tiles * tl.where(s > 0, 1.0 / tl.maximum(s, 1e-38), 0.0)[:, None])
        tl.store(codes + place[:, None] * 32 + i, c.to(tl.int8))
        tl.store(scale + place, s.to(tl.float16))
    else:
        largest, smallest = tl.max(tiles, 1), tl.min(tiles, 1)
        s = tl.where(largest >= -smallest, largest, smallest) / -8.0
        inverse = tl.where(s == 0, 0.0, 1.0 / tl.where(s == 0, 1.0, s))[:, None]
        c = tl.minimum(tl.floor(tiles * inverse + 8.5), 15.0).to(tl.int32)
        low, high = tl.split(tl.permute(tl.reshape(c, [TILES, 2, 16]), (0, 2, 1)))
        tl.store(codes + place[:, None] * 16 + tl.arange(0, 16)[None, :], (low | high << 4).to(tl.int8))
        tl.store(scale + place, s.to(tl.float16))


@triton.jit
def _enter(
    q, k, v, q_stride, k_stride, v_stride, positions, slots, frequencies, magnitude,
    q_out, k_codes, k_scale, v_codes, v_scale, head_rows, first_row,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, LOG_DIM: tl.constexpr, BS: tl.constexpr, N_DIMS: tl.constexpr, HALVES: tl.constexpr,
    TURN_K: tl.constexpr, TURN_V: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position, slot = tl.load(positions + row), tl.load(slots + row).to(tl.int64)
    if head < Q_HEADS:
        x = _rope(q, row * q_stride + head * DIM, position, frequencies, magnitude, DIM, N_DIMS, HALVES)
        if TURN_K:
            x = tl.reshape(hadamard(tl.reshape(x, [1, DIM]), 1, DIM, LOG_DIM), [DIM])
        tl.store(q_out + (row * Q_HEADS + head) * DIM + tl.arange(0, DIM), x)
    elif slot < 0:
        return
    elif head < Q_HEADS + KV_HEADS:
        kv = head - Q_HEADS
        x = _rope(k, row * k_stride + kv * DIM, position, frequencies, magnitude, DIM, N_DIMS, HALVES)
        if TURN_K:
            x = tl.reshape(hadamard(tl.reshape(x, [1, DIM]), 1, DIM, LOG_DIM), [DIM])
        _store(x, k_codes, k_scale, slot, first_row + kv, head_rows, K_KIND, DIM, BS)
    else:
        kv = head - Q_HEADS - KV_HEADS
        x = tl.load(v + row * v_stride + kv * DIM + tl.arange(0, DIM))
        if TURN_V:
            x = tl.reshape(hadamard(tl.reshape(x, [1, DIM]), 1, DIM, LOG_DIM), [DIM])
        _store(x, v_codes, v_scale, slot, first_row + kv, head_rows, V_KIND, DIM, BS)


@dataclass(frozen=True, eq=False)
class RopeTable:
    """What graph.ops.Rope says, on the device."""

    frequencies: torch.Tensor  # float32 (n_dims / 2,): radians per position
    n_dims: int
    halves: bool  # pairs (i, i + n/2) rather than (2i, 2i + 1)
    magnitude: float


def enter(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rope: RopeTable,
    keys: CachePlanes,
    values: CachePlanes,
    head_rows: slice,
    q_out: torch.Tensor,
    *,
    rotate_k: bool,
    rotate_v: bool,
) -> torch.Tensor:
    """q, k, v (rows, heads, dim) float32, each row contiguous → q_out, and K and V in the cache at `slots` (int32)."""
    n_rows, n_heads, dim = q.shape
    assert all(x.stride()[1:] == (dim, 1) and x.dtype == torch.float32 for x in (q, k, v))
    assert k.shape == v.shape == (n_rows, head_rows.stop - head_rows.start, dim)
    assert q_out.is_contiguous()
    assert q_out.shape == q.shape
    assert dim >= 64
    assert dim & (dim - 1) == 0, "head dim is no power of two"
    n_kv_heads = k.shape[1]
    _enter[(n_rows, n_heads + 2 * n_kv_heads)](
        q, k, v, q.stride(0), k.stride(0), v.stride(0), positions, slots, rope.frequencies, rope.magnitude,
        q_out, _writable(keys), keys.scale, _writable(values), values.scale,
        keys.codes.shape[1], head_rows.start,
        K_KIND=keys.kind, V_KIND=values.kind, Q_HEADS=n_heads, KV_HEADS=n_kv_heads, DIM=dim,
        LOG_DIM=dim.bit_length() - 1, BS=keys.codes.shape[3], N_DIMS=rope.n_dims, HALVES=rope.halves,
        TURN_K=rotate_k, TURN_V=rotate_v, num_warps=1,
    )  # fmt: skip
    return q_out


def _writable(planes: CachePlanes) -> torch.Tensor:
    return planes.codes if planes.kind == "f16" else planes.codes.view(torch.int8)
