"""Weights in the layout that the kernels read: planes of codes and of scales, repacked once at load, on the device.

Per block of 32 values of a row (values 0-15 are its low half, 16-31 its high half), in 32-bit words:

    kind   codes                                        scale                            bytes   value
    Q8_0   word j: values 4j … 4j+3, signed bytes       float16                          34      s · c
    Q4_0   word j: values 4j … in its bytes' low        float16                          18      s · (c - 8)
           nibbles, 16+4j … in their high nibbles
    Q4_K   the same                                     two float16: scale, minimum      20      s · c - m
    Q6_K   the same, and in `high` two words: bits      two float16: of the low and      28      s · (c - 32)
           2j, 2j+1 of each byte of word 0 belong to    of the high half
           values 4j … 4j+3, of word 1 to the high half
    IQ4    word j: values 4j … in the nibbles of its    float16                          18      s · level(c)
           low half, 16+4j … in those of its high half
    MXFP4  the same                                     float16: half of the power of two 18      s · level(c)
    F16, BF16, F32 of few rows: plain values, no scale.

IQ4_XS and IQ4_NL are IQ4, Q4_1 is Q4_K with a minimum of the other sign. Formats without planes become BF16.

Within a row, word j of all blocks comes before word j+1 of any (word, block): a thread loads the same word of four
neighbouring blocks at once, next to their four scales, and no value has to change threads. A K-quant's scale of a
scale is multiplied out, to float16. Rows stay rows: slices and concatenations of matrices are those of their planes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from motley.errors import PlanError
from motley.formats import PackedTensor
from motley.formats.bits import join_bits, split_bits
from motley.formats.layout import SixBitPairs
from motley.formats.numeric import to_half

BLOCK = 32  # values of a row that the kernels take together
PLAIN_KINDS = ("F32", "F16", "BF16")  # stay as they are
_MAX_F32_ROWS = 1024  # of a matrix of F32 that stays so: a router, whose choice hangs on small differences


@dataclass(frozen=True, eq=False)
class WeightPlanes:
    """A matrix (n_rows, n_columns) in planes."""

    kind: str
    n_columns: int
    codes: torch.Tensor  # int32 (rows, words); of plain kinds bit patterns (rows, columns)
    scale: torch.Tensor | None = None  # float16 (rows, blocks), or int32 (rows, blocks): two float16
    high: torch.Tensor | None = None  # int32 (rows, 2 · blocks)

    @property
    def is_packed(self) -> bool:
        """Whether values are codes, which kernels of our own multiply by; plain ones are the library's."""
        return self.kind not in PLAIN_KINDS

    @property
    def n_rows(self) -> int:
        return self.codes.shape[0]

    @property
    def n_bytes(self) -> int:
        parts = (self.codes, self.scale, self.high)
        return sum(part.numel() * part.itemsize for part in parts if part is not None)

    def rows(self, start: int, stop: int) -> WeightPlanes:
        """A view of some rows."""

        def cut(part: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else part[start:stop]

        return WeightPlanes(
            self.kind, self.n_columns, self.codes[start:stop], cut(self.scale), cut(self.high)
        )


def join_rows(parts: Sequence[WeightPlanes]) -> WeightPlanes:
    """Matrices of one kind and width on top of each other, so that one launch can multiply by all of them."""
    first = parts[0]
    assert all((p.kind, p.n_columns) == (first.kind, first.n_columns) for p in parts), "unlike matrices"

    def join(pieces: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        present = [piece for piece in pieces if piece is not None]
        return torch.cat(present) if present else None

    codes = torch.cat([p.codes for p in parts])
    scale, high = join([p.scale for p in parts]), join([p.high for p in parts])
    return WeightPlanes(first.kind, first.n_columns, codes, scale, high)


def to_planes(weight: PackedTensor) -> WeightPlanes:
    """The matrix `weight` (rows, columns) in planes, on its own device."""
    if len(weight.shape) != 2:
        raise PlanError(f"only matrices have planes, not {weight.shape}")
    n_rows, n_columns = weight.shape
    name = weight.format.name
    if stays_plain(name, n_rows, n_columns) and weight.data.numel():
        bits = torch.int32 if name == "F32" else torch.int16
        return WeightPlanes(name, n_columns, weight.data.contiguous().view(bits))
    if not has_planes(name, n_columns) or not weight.data.numel() or _is_beyond_half(weight):
        return WeightPlanes("BF16", n_columns, weight.unpack().to(torch.bfloat16).view(torch.int16))
    codes, scale, high = _REPACK[name](weight.data.reshape(-1, weight.format.block_bytes))
    return WeightPlanes(
        _KIND.get(name, name),
        n_columns,
        _by_word(codes, n_rows, n_columns // BLOCK),
        scale.reshape(n_rows, -1).contiguous(),
        None if high is None else _by_word(high, n_rows, n_columns // BLOCK),
    )


def stays_plain(name: str, n_rows: int, n_columns: int) -> bool:
    """Whether a matrix of that format has its own plain values on the device; others become BF16, or are packed.

    Matrices of F32 do not, but for routers and for those with few columns, which are no products' (convolutions).
    """
    is_small = n_rows <= _MAX_F32_ROWS or n_columns < BLOCK
    return name in PLAIN_KINDS and (name != "F32" or is_small)


def has_planes(name: str, n_columns: int) -> bool:
    """Whether a matrix of that format stays packed."""
    return name in _REPACK and n_columns % BLOCK == 0


def plane_bytes(name: str, n_rows: int, n_columns: int) -> int:
    """The bytes of a matrix of that format in planes, without making it: torch takes seconds to import what meta
    tensors need.
    """
    if not has_planes(name, n_columns):
        return (4 if name == "F32" and stays_plain(name, n_rows, n_columns) else 2) * n_rows * n_columns
    return n_rows * n_columns // BLOCK * _BLOCK_BYTES[_KIND.get(name, name)]


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # codes, scale, high; per GGUF block


def _q8_0(blocks: torch.Tensor) -> _Parts:
    return blocks[:, 2:], _halves(blocks[:, :2]), None


def _q4_0(blocks: torch.Tensor) -> _Parts:
    return blocks[:, 2:], _halves(blocks[:, :2]), None


def _q4_1(blocks: torch.Tensor) -> _Parts:
    scale, minimum = _halves(blocks[:, :2]).float(), _halves(blocks[:, 2:4]).float()
    return blocks[:, 4:], _pairs(scale, -minimum), None


def _q4_k(blocks: torch.Tensor) -> _Parts:
    scale, minimum, sub, codes = torch.split(blocks, [2, 2, 12, 128], -1)
    whole = SixBitPairs("scales", "offsets").read(sub)  # (blocks, 8) each
    scales = _halves(scale).float() * whole["scales"]
    minima = _halves(minimum).float() * whole["offsets"]
    nibbles = split_bits(codes, bits=4, width=32)  # (blocks, 256), in the order of values
    return join_bits(nibbles, bits=4, width=16), _pairs(scales, minima), None


def _q6_k(blocks: torch.Tensor) -> _Parts:
    low, upper, sub, scale = torch.split(blocks, [128, 64, 16, 2], -1)
    nibbles = split_bits(low, bits=4, width=64)
    pairs_of_bits = split_bits(upper, bits=2, width=32)
    scales = torch.unflatten(_halves(scale).float() * sub.contiguous().view(torch.int8), -1, (8, 2))
    # Runs of four values: run j of a half goes to bits 2j of its word's four bytes.
    high = join_bits(pairs_of_bits, bits=2, width=4)
    return join_bits(nibbles, bits=4, width=16), _pairs(scales[..., 0], scales[..., 1]), high


def _iq4_nl(blocks: torch.Tensor) -> _Parts:
    return _by_halves(split_bits(blocks[:, 2:], bits=4, width=16)), _halves(blocks[:, :2]), None


def _iq4_xs(blocks: torch.Tensor) -> _Parts:
    scale, upper, lower, codes = torch.split(blocks, [2, 2, 4, 128], -1)
    whole = split_bits(lower, bits=4, width=1) | split_bits(upper, bits=2, width=1) << 4  # (blocks, 8)
    scales = _halves(scale).float() * (whole.float() - 32)
    return _by_halves(split_bits(codes, bits=4, width=16)), to_half(scales), None


def _mxfp4(blocks: torch.Tensor) -> _Parts:
    scale = torch.ldexp(torch.ones(len(blocks), 1, device=blocks.device), blocks[:, :1].int() - 128)
    return _by_halves(split_bits(blocks[:, 1:], bits=4, width=16)), scale.half(), None


def _is_beyond_half(weight: PackedTensor) -> bool:
    """Whether scales or values of MXFP4 are no float16: they have eight bits of exponent. Models are far from it."""
    if weight.format.name != "MXFP4":
        return False
    exponents = weight.data.reshape(-1, weight.format.block_bytes)[:, 0]
    has_codes = weight.data.reshape(-1, weight.format.block_bytes)[:, 1:].any(-1)
    return bool((has_codes & ((exponents < 128 - 24) | (exponents > 128 + 12))).any())


_REPACK = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
_BLOCK_BYTES = {
    "Q8_0": 34,
    "Q4_0": 18,
    "Q4_K": 20,
    "Q6_K": 28,
    "IQ4": 18,
    "MXFP4": 18,
}  # of 32 values, by kind
_KIND = {"Q4_1": "Q4_K", "IQ4_NL": "IQ4", "IQ4_XS": "IQ4"}


def _by_halves(nibbles: torch.Tensor) -> torch.Tensor:
    """Codes in the order of values → words of four values of a block's low half and four of its high half."""
    runs = torch.unflatten(nibbles, -1, (-1, 2, 4, 4)).transpose(-3, -2)  # (…, blocks, words, halves, 4)
    return join_bits(runs.flatten(1), bits=4, width=1)


def _by_word(data: torch.Tensor, n_rows: int, n_blocks: int) -> torch.Tensor:
    """Bytes in the order of blocks → int32 (rows, words · blocks)."""
    aligned = data.clone(memory_format=torch.contiguous_format)  # a single block's codes start amid a word
    words = aligned.view(torch.int32).reshape(n_rows, n_blocks, -1)
    return words.transpose(1, 2).reshape(n_rows, -1)


def _halves(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.float16)


def _pairs(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Two float32 tensors as one int32 tensor of float16 pairs, the first in the low bits."""
    both = to_half(torch.stack([first, second], -1))
    return both.contiguous().view(torch.int32).squeeze(-1)
