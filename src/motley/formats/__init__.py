"""How weights and cache entries are stored: a table of formats, each with its block, its pack and its unpack.

bits      bit fields inside bytes, the one primitive under every layout
grids     the whole numbers that a code can stand for
planar    32-value quantizers: values <-> planes of codes, scales and minima
block32   the GGUF arrangement of those planes (Q4_0 ... Q8_0, IQ4_NL)
plain     F32, F16, BF16
packed    `Format` and `PackedTensor`
"""

from __future__ import annotations

from motley.formats.packed import Format, PackedTensor
from motley.formats.planar import QUANTIZERS, Planes, Quantizer
from motley.formats.table import FORMATS, get_format

__all__ = ["FORMATS", "QUANTIZERS", "Format", "PackedTensor", "Planes", "Quantizer", "get_format"]
