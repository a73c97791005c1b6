"""How weights and cache entries are stored: a table of formats, each with its block, its pack and its unpack.

table       the formats by name
packed      `Format`, and `PackedTensor`: a tensor that stays packed
plain       F32, F16, BF16
planar      quantizers of 32 values: values <-> planes of codes, scales and minima
superblock  quantizers of 256 values: the scales are quantized too
search      search for the scales with the smallest error
block32     how GGUF arranges the planes of 32-value blocks
block256    ... and of 256-value super-blocks
mxfp4       32 four-bit floats and a power of two
layout      fields of a block <-> planes
grids       the whole numbers that codes stand for
bits        bit fields inside bytes
numeric     arithmetic that stays finite
"""

from __future__ import annotations

from motley.formats.packed import Format, PackedTensor
from motley.formats.planar import QUANTIZERS, Planes, Quantizer
from motley.formats.table import FORMATS, get_format

__all__ = ["FORMATS", "QUANTIZERS", "Format", "PackedTensor", "Planes", "Quantizer", "get_format"]
