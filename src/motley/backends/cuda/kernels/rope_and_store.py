"""Queries, keys and values on their way into attention: rotary positions, the Hadamard rotation, and the cache.

One program for a token's head. Queries: normed, where the model does so, rotated by position, then (quantized keys) by
H → q. Keys: the same → cache. Values: by H where they are quantized → cache (`quantize`). A slot of -1 stores nothing.
Reference: graph.ops.Rope, graph.ops.Hadamard, kvcache.store.Store.write.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.hadamard import rotated
from motley.backends.cuda.kernels.overlap import let_next_start, overlapping, wait
from motley.backends.cuda.kernels.quantize import store_head
from motley.backends.cuda.kernels.tiles import CachePlanes


@triton.jit
def _rotation(
    norm, position, frequencies, magnitude, DIM: tl.constexpr, D: tl.constexpr, N_DIMS: tl.constexpr,
    HALVES: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Loads data that no earlier kernel computes: each dim's partner, the factors of both, their norms' weights."""
    d = tl.arange(0, D)
    moves = d < N_DIMS
    if HALVES:
        is_first, pair = d < N_DIMS // 2, d % (N_DIMS // 2)
        partner = tl.where(is_first, d + N_DIMS // 2, d - N_DIMS // 2)
    else:
        is_first, pair, partner = d % 2 == 0, d // 2, d ^ 1
    angle = position.to(tl.float32) * tl.load(frequencies + pair, moves, other=0.0)
    own = tl.where(moves, tl.cos(angle) * magnitude, 1.0)
    other = tl.where(is_first, -tl.sin(angle), tl.sin(angle)) * magnitude
    if NORMS:
        own *= tl.load(norm + d, d < DIM, other=0.0)
        other *= tl.load(norm + partner, moves, other=0.0)
    return partner, own, other


@triton.jit
def _rope(
    x, at, partner, own, other, eps, DIM: tl.constexpr, D: tl.constexpr, N_DIMS: tl.constexpr, NORMS: tl.constexpr
):  # fmt: skip
    """x[at + 0 … DIM], normed, rotated by position, zeros up to D; the partner of a dim is read again, from memory."""
    d = tl.arange(0, D)
    v = tl.load(x + at + d, d < DIM, other=0.0)
    result = v * own + tl.load(x + at + partner, d < N_DIMS, other=0.0) * other
    if NORMS:
        result *= tl.rsqrt(tl.sum(v * v, 0) / DIM + eps)
    return result


@triton.jit(do_not_specialize=["head_rows", "first_row"])
def _rope_and_store(
    q, k, v, q_stride, k_stride, v_stride, q_norm, k_norm, eps, positions, slots, frequencies, magnitude,
    q_out, keys, values, head_rows, first_row,
    K_KIND: tl.constexpr, V_KIND: tl.constexpr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, BS: tl.constexpr, N_DIMS: tl.constexpr, HALVES: tl.constexpr,
    ROTATION: tl.constexpr, LOG_ROTATION: tl.constexpr, ROTATE_K: tl.constexpr, ROTATE_V: tl.constexpr,
    NORMS: tl.constexpr,
):  # fmt: skip
    let_next_start()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position, slot = tl.load(positions + row), tl.load(slots + row).to(tl.int64)
    TILES: tl.constexpr = (DIM + 31) // 32
    N: tl.constexpr = triton.next_power_of_2(TILES)
    D: tl.constexpr = N * 32
    if head < Q_HEADS:
        partner, own, other = _rotation(
            q_norm, position, frequencies, magnitude, DIM, D, N_DIMS, HALVES, NORMS
        )
        wait()  # not for positions and slots, which are there before the first kernel of a batch starts
        x = _rope(q, row * q_stride + head * DIM, partner, own, other, eps, DIM, D, N_DIMS, NORMS)
        if ROTATE_K:
            x = rotated(x, D, ROTATION, LOG_ROTATION)
        d = tl.arange(0, D)
        tl.store(q_out + (row * Q_HEADS + head) * DIM + d, x, d < DIM)
    elif head < Q_HEADS + KV_HEADS:
        kv = head - Q_HEADS
        partner, own, other = _rotation(
            k_norm, position, frequencies, magnitude, DIM, D, N_DIMS, HALVES, NORMS
        )
        wait()
        if slot < 0:
            return
        x = _rope(k, row * k_stride + kv * DIM, partner, own, other, eps, DIM, D, N_DIMS, NORMS)
        if ROTATE_K:
            x = rotated(x, D, ROTATION, LOG_ROTATION)
        store_head(x, keys, slot, first_row + kv, head_rows, K_KIND, TILES, N, BS)
    else:
        wait()
        if slot < 0:
            return
        kv = head - Q_HEADS - KV_HEADS
        d = tl.arange(0, D)
        x = tl.load(v + row * v_stride + kv * DIM + d, d < DIM, other=0.0)
        if ROTATE_V:
            x = rotated(x, D, ROTATION, LOG_ROTATION)
        store_head(x, values, slot, first_row + kv, head_rows, V_KIND, TILES, N, BS)


@dataclass(frozen=True, eq=False)
class RopeTable:
    """The parameters of graph.ops.Rope, on the device."""

    frequencies: torch.Tensor  # float32 (n_dims / 2,): radians per position
    n_dims: int
    halves: bool  # pairs (i, i + n/2) rather than (2i, 2i + 1)
    magnitude: float


@dataclass(frozen=True, eq=False)
class HeadNorms:
    """Norms of each head's queries and keys, before they are rotated: float32 (dim,) each."""

    queries: torch.Tensor
    keys: torch.Tensor
    eps: float

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, float]:
        return self.queries, self.keys, self.eps


def has_whole_rows(x: torch.Tensor) -> bool:
    """Whether each row of x (rows, heads, dim) is contiguous. The stride of a single head says nothing: it may be that
    of the tensor that it is a slice of, and torch calls the slice contiguous.
    """
    return x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])


def rope_and_store(
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
    rotation: int | None = None,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """q, k, v (rows, heads, dim) float32, each row contiguous → q_out, and K and V in the cache at `slots` (int32).

    `rotation`: the size of the rotation, where it is not the head's.
    """
    n_rows, n_heads, dim = q.shape
    assert all(has_whole_rows(x) and x.dtype == torch.float32 for x in (q, k, v))
    assert k.shape == v.shape == (n_rows, head_rows.stop - head_rows.start, dim)
    assert q_out.is_contiguous()
    assert q_out.shape == q.shape
    rotation = (rotation or dim) if rotate_k or rotate_v else 1
    assert dim % rotation == rotation & (rotation - 1) == 0, "only powers of two have a Hadamard matrix"
    n_kv_heads = k.shape[1]
    _rope_and_store[(n_rows, n_heads + 2 * n_kv_heads)](
        q, k, v, q.stride(0), k.stride(0), v.stride(0), *(norms.arguments if norms else (q, k, 0.0)),
        positions, slots, rope.frequencies, rope.magnitude,
        q_out, keys.writable, values.writable, keys.codes.shape[1], head_rows.start,
        K_KIND=keys.kind, V_KIND=values.kind, Q_HEADS=n_heads, KV_HEADS=n_kv_heads, DIM=dim,
        BS=keys.block_size, N_DIMS=rope.n_dims, HALVES=rope.halves, ROTATION=rotation,
        LOG_ROTATION=rotation.bit_length() - 1,
        ROTATE_K=rotate_k, ROTATE_V=rotate_v, NORMS=norms is not None, num_warps=1, **overlapping(),
    )  # fmt: skip
    return q_out
