"""Tiles of the cache as operands of the tensor cores: (column, token), float16; of f32 and bf16 caches float32.

Planes are those of kvcache.store: (block, head row, tile of 32 dims, token, width). A column of a tile is

    q8_0, q4_0     a 32-bit word; its bytes (q4_0: low, then upper nibbles) are operands of their own, `n_parts` in all:
                   q8_0  part i  dim 4w + i        q4_0  part 2i + u  dim 4 (w % 4) + i + 16 u of tile w // 4
    all others     a dim; values are unpacked one by one, by a table of the code's levels: slow, and right

Two tokens' (or two words') bytes become a pair of float16 by one byte permutation and one mask, where they stay whole
numbers: bits below the exponent are a subnormal number, code · 2⁻²⁴ (`exact_parts`, which leave the scale to the
caller), or, under the exponent of 128, 128 + code / 8, from which one multiply-add makes code / 8 · scale
(`scaled_parts`). Upper nibbles stay where they are, and are sixteen times too large (`unit`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from motley.backends.cuda.kernels.bits import byte_as_half, multiply_add, nibbles_as_halves
from motley.formats import QUANTIZERS

TILE = 32


@triton.constexpr_function
def is_words(kind):
    """Whether columns are 32-bit words of codes."""
    return kind == "q8_0" or kind == "q4_0"


@triton.constexpr_function
def is_plain(kind):
    return kind in ("f32", "f16", "bf16")


@triton.constexpr_function
def operand(kind):
    """The type in which a cache's values are multiplied.

    float32 where values may be beyond float16's 65,504. The tensor cores take it as tf32: float32's range and, for
    products, float16's precision.
    """
    return tl.float32 if kind in ("f32", "bf16") else tl.float16


@triton.constexpr_function
def is_fast(kind):
    """Whether values are not unpacked one by one."""
    return is_words(kind) or is_plain(kind)


@triton.constexpr_function
def has_high_bits(kind):
    return kind in ("q5_0", "q5_1")


@triton.constexpr_function
def has_minimum(kind):
    return kind in ("q4_1", "q5_1")


@triton.constexpr_function
def n_parts(kind):
    """Operands that a tile's columns are taken apart into."""
    return {"q8_0": 4, "q4_0": 8}.get(kind, 1)


@triton.constexpr_function
def n_columns(kind, n_tiles):
    """Columns of `n_tiles` tiles, padded to what a tensor core takes."""
    return max(16, triton.next_power_of_2(n_tiles) * 32 // n_parts(kind))


def tile_bytes(kind: str) -> int:
    """The bytes of one token's 32 dims in a cache that `is_fast`."""
    if is_words(kind):
        n_words: int = 32 // n_parts(kind)
        return 4 * n_words + 2  # and a scale
    return 128 if kind == "f32" else 64


@triton.jit
def dims(w, part: tl.constexpr, KIND: tl.constexpr):
    """Which dims are in columns w of operand `part`."""
    if KIND == "q8_0":
        return 4 * w + part
    elif KIND == "q4_0":
        return w // 4 * 32 + w % 4 * 4 + part // 2 + part % 2 * 16
    else:
        return w


@triton.constexpr_function
def unit(part, kind):
    """How many times too large an operand is, compared with the first."""
    return 16 if kind == "q4_0" and part % 2 else 1


@triton.constexpr_function
def zero_code(kind):
    """The unsigned code that means zero."""
    return {"q8_0": 128, "q4_0": 8}.get(kind, 0)


@triton.jit
def _pick(at, t, BS: tl.constexpr):
    """The head that token t belongs to: of two blocks' heads, or of one's."""
    if len(at) == 1:
        return at[0]
    else:
        return tl.where(t < BS, at[0], at[1])


@triton.jit
def load_columns(planes, at, KIND: tl.constexpr, TILES: tl.constexpr, BS: tl.constexpr, seen=None):
    """One head in one or two blocks: (columns, tokens), words or values of type `operand`, with zeros as padding.

    `at`: for each block, block · head rows + row. `seen`, where given: which tokens count. Of the others, whose memory
    may hold anything, values are zeros; words are as they are, for their scales are zeros.
    """
    W: tl.constexpr = n_columns(KIND, TILES)
    T: tl.constexpr = BS * len(at)
    PER: tl.constexpr = 32 // n_parts(KIND)
    N: tl.constexpr = W // PER
    if is_fast(KIND):
        # Addressed as (token, column of a tile, tile), so that a warp copies one run of memory to one run of shared
        # memory: what is not in one run there is fetched twice, by halves of sectors.
        t = tl.arange(0, T)[:, None, None]
        column, tile = tl.arange(0, PER)[None, :, None], tl.arange(0, N)[None, None, :]
        pointers = planes[0] + _pick(at, t, BS) * (TILES * BS * PER) + ((tile * BS + t % BS) * PER + column)
        inside = (tile < TILES) & (column >= 0) & (t >= 0)
        if seen is not None and not is_words(KIND):
            x = tl.load(pointers, inside & seen[:, None, None], other=0)
        elif N == TILES:
            x = tl.load(pointers)
        else:
            x = tl.load(pointers, inside, other=0)
        x = tl.reshape(tl.permute(x, (2, 1, 0)), [W, T])
        return x if is_words(KIND) else x.to(operand(KIND))
    else:
        w, t = tl.arange(0, W)[:, None], tl.arange(0, T)[None, :]
        inside = (w < TILES * 32) & (t >= 0)
        if seen is not None:
            inside &= seen[None, :]
        token, i = (_pick(at, t, BS) * TILES + w // 32) * BS + t % BS, w % 32
        byte = tl.load(planes[0] + token * 16 + i % 16, inside, other=0).to(tl.int32)
        code = (byte >> tl.where(i < 16, 0, 4)) & 15
        if has_high_bits(KIND):
            high = tl.load(planes[2] + token * 4 + i // 8, inside, other=0).to(tl.int32)
            code |= ((high >> (i % 8)) & 1) << 4
        x = tl.load(planes[4] + code) * tl.load(planes[1] + token, inside, other=0.0).to(tl.float32)
        if has_minimum(KIND):
            x += tl.load(planes[3] + token, inside, other=0.0).to(tl.float32)
        return tl.where(inside, x, 0.0).to(tl.float16)


@triton.jit
def load_scales(planes, at, KIND: tl.constexpr, TILES: tl.constexpr, BS: tl.constexpr, seen=None):
    """float16 (tiles, tokens), as many tiles as `load_columns` has; only of words. Zeros where tokens are not seen."""
    N: tl.constexpr = n_columns(KIND, TILES) * n_parts(KIND) // 32
    tile, t = tl.arange(0, N)[:, None], tl.arange(0, BS * len(at))[None, :]
    pointers = planes[1] + _pick(at, t, BS) * (TILES * BS) + (tile * BS + t % BS)
    if N == TILES:
        scale = tl.load(pointers)
    else:
        scale = tl.load(pointers, (tile < TILES) & (t >= 0), other=0.0)
    if seen is not None:  # not by a mask: loads of single values could not be made ahead
        scale = tl.where(seen[None, :], scale, 0.0)
    return scale


@triton.jit
def exact_parts(x, i: tl.constexpr, KIND: tl.constexpr, PLAIN: tl.constexpr):
    """The operands of byte i of words: unsigned codes times 2⁻²⁴ and their `unit`. Of values, they themselves."""
    if KIND == "q4_0":
        return nibbles_as_halves(x, i, 0x0000, PLAIN)
    elif KIND == "q8_0":
        return (byte_as_half(x, i, 0x0000, PLAIN),)
    else:
        return (x,)


@triton.jit
def spread(scale, KIND: tl.constexpr):
    """Scales (tiles, tokens) → (columns, tokens), in registers."""
    N: tl.constexpr = scale.shape[0]
    T: tl.constexpr = scale.shape[1]
    PER: tl.constexpr = 32 // n_parts(KIND)
    return tl.reshape(tl.broadcast_to(tl.expand_dims(scale, 1), [N, PER, T]), [N * PER, T])


@triton.jit
def bias_of(scale, KIND: tl.constexpr, PLAIN: tl.constexpr):
    """The amount that `scaled_parts` add to (128 + code / 8) · scale, and its surplus; both float16.

    128 · scale is exact, and the surplus is that of the zero code, scale · 8 / 8. Bytes are centred instead: the zero
    code's 144 · scale is rounded, and the surplus is the rounding error, a float16 itself.
    """
    if KIND == "q4_0":
        return scale * -128.0, scale
    else:
        bias = scale * -144.0
        return bias, multiply_add(scale, tl.full(scale.shape, 144.0, tl.float16), bias, PLAIN)


@triton.jit
def scaled_parts(x, scale, bias, i: tl.constexpr, KIND: tl.constexpr, PLAIN: tl.constexpr):
    """The operands of byte i of words: an eighth of values, plus the surplus of `bias_of`, times their `unit`."""
    if KIND == "q4_0":
        low, high = nibbles_as_halves(x, i, 0x5800, PLAIN)
        return multiply_add(low, scale, bias, PLAIN), multiply_add(high, scale, bias, PLAIN)
    elif KIND == "q8_0":
        return (multiply_add(byte_as_half(x, i, 0x5800, PLAIN), scale, bias, PLAIN),)
    else:
        return (x,)


@dataclass(frozen=True, eq=False)
class CachePlanes:
    """K or V of all blocks: what kvcache.store.Store holds, as the kernels read it."""

    kind: str
    codes: torch.Tensor  # values, int32 words, or bytes of codes: (block, head row, tile, token, columns)
    scale: torch.Tensor  # float16 (block, head row, tile, token, 1); what a kind lacks is its codes again
    high_bits: torch.Tensor  # uint8 (block, head row, tile, token, 4)
    minimum: torch.Tensor  # float16 (block, head row, tile, token, 1)
    levels: torch.Tensor  # float32: of each code

    @staticmethod
    def of(kind: str, planes: Mapping[str, torch.Tensor]) -> CachePlanes:
        if kind.upper() not in QUANTIZERS:
            values = planes["values"]
            return CachePlanes(kind, values, values, values, values, values)
        codes, scale = planes["codes"], planes["scale"]
        words = codes.view(torch.int32) if is_words(kind) else codes
        levels = _levels(kind, codes.device)
        return CachePlanes(
            kind, words, scale, planes.get("high_bits", codes), planes.get("minimum", scale), levels
        )

    @property
    def pointers(self) -> tuple[torch.Tensor, ...]:
        return self.codes, self.scale, self.high_bits, self.minimum, self.levels

    @property
    def writable(self) -> tuple[torch.Tensor, ...]:
        """Codes byte by byte."""
        if is_plain(self.kind):
            return self.pointers
        return self.codes.view(torch.int8), self.scale, self.high_bits.view(torch.int8), *self.pointers[3:]

    @property
    def n_tiles(self) -> int:
        return self.codes.shape[2]

    @property
    def block_size(self) -> int:
        return self.codes.shape[3]


@lru_cache
def _levels(kind: str, device: torch.device) -> torch.Tensor:
    quantizer = QUANTIZERS[kind.upper()]
    codes = torch.arange(2**quantizer.bits, dtype=torch.uint8, device=device)
    return quantizer.grid.levels(codes)
