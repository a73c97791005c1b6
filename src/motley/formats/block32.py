"""The GGUF arrangement of a 32-value block: scale, then minimum, then fifth bits, then the low bits.

scale      float16
minimum    float16                       Q4_1, Q5_1
high bits  4 bytes, the codes' fifth bits  Q5_0, Q5_1
low bits   32 bytes (Q8_0), or 16 bytes of nibbles
"""

from __future__ import annotations

import torch
from torch import Tensor

from motley.formats.bits import bytes_of, half_from_bytes, join_bits, split_bits
from motley.formats.packed import Format
from motley.formats.planar import BLOCK, QUANTIZERS, Planes, Quantizer

_HALF = 2  # bytes of a float16
_NIBBLE_WIDTH = 16  # value i shares its byte with value i + 16


def arrange(quantizer: Quantizer, planes: Planes) -> Tensor:
    """Planes of whole blocks (..., 32) -> their bytes (..., block_bytes)."""
    fields = [bytes_of(planes.scale)]
    if planes.minimum is not None:
        fields.append(bytes_of(planes.minimum))
    codes = bytes_of(planes.codes)
    if quantizer.bits == 5:
        fields.append(join_bits(codes >> 4, bits=1, width=1))
    fields.append(codes if quantizer.bits == 8 else join_bits(codes & 0x0F, bits=4, width=_NIBBLE_WIDTH))
    return torch.cat(fields, -1)


def planes_of(quantizer: Quantizer, data: Tensor) -> Planes:
    """The bytes of whole blocks (..., block_bytes) -> planes (..., 32)."""
    scale, minimum, high, low = torch.split(data, _field_bytes(quantizer), -1)
    codes = (
        low.contiguous().view(torch.int8)
        if quantizer.bits == 8
        else split_bits(low, bits=4, width=_NIBBLE_WIDTH)
    )
    if quantizer.bits == 5:
        codes = codes | split_bits(high, bits=1, width=1) << 4
    return Planes(codes, half_from_bytes(scale), half_from_bytes(minimum) if quantizer.has_minimum else None)


def _field_bytes(quantizer: Quantizer) -> list[int]:
    """Bytes of scale, minimum, high bits and low bits."""
    low_bits = 8 if quantizer.bits == 8 else 4
    return [
        _HALF,
        _HALF * quantizer.has_minimum,
        BLOCK // 8 * (quantizer.bits - low_bits),
        BLOCK // 8 * low_bits,
    ]


def _format(quantizer: Quantizer) -> Format:
    return Format(
        name=quantizer.name,
        block_size=BLOCK,
        block_bytes=sum(_field_bytes(quantizer)),
        unpack_blocks=lambda data: quantizer.dequantize(planes_of(quantizer, data)),
        pack_blocks=lambda values: arrange(quantizer, quantizer.quantize(values)),
    )


BLOCK32_FORMATS = tuple(_format(quantizer) for quantizer in QUANTIZERS.values())
