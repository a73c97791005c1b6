"""Bit fields inside bytes: all block layouts are built on these two functions.

All GGUF blocks store narrow codes in the same way. Bytes come in groups of `width`; a group holds `8 / bits`
runs of `width` codes, the first run in the lowest bits of its bytes, the next run above it, and so on:

    byte[g, w] = code[g, 0, w] | code[g, 1, w] << bits | code[g, 2, w] << 2 * bits ...

With width 1 that is a little-endian bit string.
"""

from __future__ import annotations

import torch
from torch import Tensor


def split_bits(data: Tensor, bits: int, width: int) -> Tensor:
    """Bytes (..., n) uint8 -> codes (..., n * 8 / bits) uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device).unsqueeze(-1)  # (runs, 1)
    runs = torch.unflatten(data, -1, (-1, 1, width))
    codes = runs >> shifts & (1 << bits) - 1  # (..., groups, runs, width)
    return codes.flatten(-3)


def join_bits(codes: Tensor, bits: int, width: int) -> Tensor:
    """Codes (..., n) uint8, each below 2 ** bits -> bytes (..., n * bits / 8) uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device).unsqueeze(-1)
    runs = torch.unflatten(codes, -1, (-1, 8 // bits, width)) << shifts
    return runs.sum(-2, dtype=torch.uint8).flatten(-2)
