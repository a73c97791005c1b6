"""MXFP4: blocks of 32 four-bit floats with one power of two, as gpt-oss's experts are stored.

    value = 2^(e - 127) * code      codes 0 .5 1 1.5 2 3 4 6 and their negatives (bit 3 is the sign)

    byte 0       e
    byte 1-16    codes of values 0-15 in the low halves, of values 16-31 in the high halves

Scales have no mantissa, so MXFP4 is not one of the quantizers with float16 scales (`planar`). The result equals that
of the `gguf` package, bit for bit: the scale puts the largest magnitude between 4 and 8, ties round towards zero.
There is no NaN; a block with a NaN or an infinity becomes infinite as a whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from motley.formats.bits import join_bits, split_bits
from motley.formats.packed import Format

MXFP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # codes doubled: whole numbers
_BLOCK = 32
_BIAS = 128  # bias of the exponent of the levels' unit, which is half of the scale
_LARGEST_EXPONENT = 2  # the largest code is 6, with the exponent 2


def _units(exponents: Tensor) -> Tensor:
    """Bytes e -> 2^(e - 128), float32; exact down to subnormals."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - _BIAS)


def _unpack(blocks: Tensor) -> Tensor:
    levels = torch.tensor(MXFP4_LEVELS, dtype=torch.float32, device=blocks.device)
    codes = split_bits(blocks[:, 1:], bits=4, width=_BLOCK // 2)
    return levels[codes.int()] * _units(blocks[:, :1])


def _pack(blocks: Tensor) -> Tensor:
    is_finite = blocks.isfinite().all(-1, keepdim=True)
    values = torch.where(is_finite, blocks, 0.0)
    largest = values.abs().amax(-1, keepdim=True)
    exponent = (
        torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT + _BIAS - 1
    )  # frexp: mantissa in [0.5, 1)
    exponents = torch.where(largest > 0, exponent.clamp(0, 254), 0).to(torch.uint8)
    levels = torch.tensor(MXFP4_LEVELS[:8], dtype=torch.float32, device=blocks.device)
    midpoints = (levels[1:] + levels[:-1]) / 2
    # In two halves: 2^(128 - e) itself is beyond float32 for the smallest e.
    scaled = torch.ldexp(
        torch.ldexp(values, (_BIAS - exponents.int()) // 2), (_BIAS - exponents.int() + 1) // 2
    )
    sizes = torch.bucketize(scaled.abs(), midpoints).to(torch.uint8)
    codes = torch.where((scaled < 0) & (sizes > 0), sizes + 8, sizes)
    codes = torch.where(is_finite, codes, 7)
    exponents = torch.where(is_finite, exponents, 255)
    return torch.cat(
        [exponents.to(torch.uint8), join_bits(codes.to(torch.uint8), bits=4, width=_BLOCK // 2)], -1
    )


MXFP4_FORMAT = Format("MXFP4", _BLOCK, 1 + _BLOCK // 2, _unpack, _pack)
