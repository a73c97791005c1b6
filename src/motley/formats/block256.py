"""The GGUF arrangement of 256-value super-blocks: the planes of `superblock`, field by field."""

from __future__ import annotations

import torch
from torch import Tensor

from motley.formats.layout import Bits, Half, Layout, NibblePairs, SixBitPairs
from motley.formats.packed import Format
from motley.formats.superblock import SUPER_QUANTIZERS, SUPERBLOCK, SuperPlanes, SuperQuantizer

_SCALE, _OFFSET = Half("scale"), Half("offset")
_LOW_BITS = Bits("codes", 128, bits=4, width=32)
_FIFTH_BITS = Bits("codes", 32, bits=1, width=32, first=4)

_LAYOUTS = {
    "Q2_K": Layout(
        (NibblePairs("scales", "offsets", 16), Bits("codes", 64, bits=2, width=32), _SCALE, _OFFSET)
    ),
    "Q3_K": Layout(
        (
            Bits("codes", 32, bits=1, width=32, first=2),
            Bits("codes", 64, bits=2, width=32),
            Bits("scales", 8, bits=4, width=8),
            Bits("scales", 4, bits=2, width=4, first=4),
            _SCALE,
        )
    ),
    "Q4_K": Layout((_SCALE, _OFFSET, SixBitPairs("scales", "offsets"), _LOW_BITS)),
    "Q5_K": Layout((_SCALE, _OFFSET, SixBitPairs("scales", "offsets"), _FIFTH_BITS, _LOW_BITS)),
    "Q6_K": Layout(
        (
            Bits("codes", 128, bits=4, width=64),
            Bits("codes", 64, bits=2, width=32, first=4),
            Bits("scales", 16, bits=8, width=16),
            _SCALE,
        )
    ),
    "IQ4_XS": Layout(
        (
            _SCALE,
            Bits("scales", 2, bits=2, width=1, first=4),
            Bits("scales", 4, bits=4, width=1),
            Bits("codes", 128, bits=4, width=16),
        )
    ),
}

_CHUNK = 2048  # super-blocks per search, which limits the memory for trials


def _format(quantizer: SuperQuantizer, layout: Layout) -> Format:
    def unpack(blocks: Tensor) -> Tensor:
        return quantizer.dequantize(SuperPlanes(**layout.read(blocks)))

    def pack(blocks: Tensor) -> Tensor:
        return torch.cat(
            [layout.write(vars(quantizer.quantize(chunk))) for chunk in torch.split(blocks, _CHUNK)]
        )

    return Format(quantizer.name, SUPERBLOCK, layout.block_bytes, unpack, pack)


BLOCK256_FORMATS = tuple(_format(SUPER_QUANTIZERS[name], layout) for name, layout in _LAYOUTS.items())
