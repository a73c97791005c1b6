"""The GGUF arrangement of 32-value blocks: the planes of `planar`, field by field."""

from __future__ import annotations

from torch import Tensor

from motley.formats.layout import Bits, Half, Layout
from motley.formats.packed import Format
from motley.formats.planar import BLOCK, QUANTIZERS, Planes, Quantizer

_NIBBLES = Bits("codes", 16, bits=4, width=16)
_FIFTH_BITS = Bits("codes", 4, bits=1, width=1, first=4)

_LAYOUTS = {
    "Q4_0": Layout((Half("scale"), _NIBBLES)),
    "Q4_1": Layout((Half("scale"), Half("minimum"), _NIBBLES)),
    "Q5_0": Layout((Half("scale"), _FIFTH_BITS, _NIBBLES)),
    "Q5_1": Layout((Half("scale"), Half("minimum"), _FIFTH_BITS, _NIBBLES)),
    "Q8_0": Layout((Half("scale"), Bits("codes", 32, bits=8, width=32))),
    "IQ4_NL": Layout((Half("scale"), _NIBBLES)),
}


def _format(quantizer: Quantizer, layout: Layout) -> Format:
    def unpack(blocks: Tensor) -> Tensor:
        return quantizer.dequantize(Planes(**layout.read(blocks)))

    def pack(blocks: Tensor) -> Tensor:
        return layout.write(vars(quantizer.quantize(blocks)))

    return Format(quantizer.name, BLOCK, layout.block_bytes, unpack, pack)


BLOCK32_FORMATS = tuple(_format(QUANTIZERS[name], layout) for name, layout in _LAYOUTS.items())
