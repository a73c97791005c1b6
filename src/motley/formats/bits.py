"""Bit fields inside bytes: the one primitive under every block layout.

All GGUF blocks store narrow codes in the same way. Bytes come in groups of `width`; a group holds `8 / bits`
runs of `width` codes, the first run in the lowest bits of its bytes, the next run above it, and so on:

    byte[g, w] = code[g, 0, w] | code[g, 1, w] << bits | code[g, 2, w] << 2*bits ...

With width 1 that is the familiar little-endian bit string.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF_MAX = torch.finfo(torch.float16).max


def split_bits(data: Tensor, bits: int, width: int) -> Tensor:
    """Bytes (..., n) uint8 -> codes (..., n * 8 / bits) uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device).unsqueeze(-1)  # (runs, 1)
    codes = (torch.unflatten(data, -1, (-1, 1, width)) >> shifts) & (
        (1 << bits) - 1
    )  # (..., groups, runs, width)
    return codes.flatten(-3)


def join_bits(codes: Tensor, bits: int, width: int) -> Tensor:
    """Codes (..., n) uint8, each below 2**bits -> bytes (..., n * bits / 8) uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device).unsqueeze(-1)
    runs = torch.unflatten(codes, -1, (-1, 8 // bits, width)) << shifts
    return runs.sum(-2, dtype=torch.uint8).flatten(-2)


def half_from_bytes(data: Tensor) -> Tensor:
    """Bytes (..., 2 * n) -> float16 (..., n)."""
    return data.contiguous().view(torch.float16)


def bytes_of(values: Tensor) -> Tensor:
    """The bytes of any tensor, in memory order: (..., n) -> (..., n * itemsize) uint8."""
    return values.contiguous().view(torch.uint8)


def to_half(values: Tensor) -> Tensor:
    """Rounds to float16, saturating: an infinite scale would turn zeros into NaN."""
    return values.clamp(-_HALF_MAX, _HALF_MAX).half()
