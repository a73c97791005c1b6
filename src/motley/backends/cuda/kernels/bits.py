"""Bit tricks that the kernels share. Each has a plain twin for Triton's interpreter, which runs no inline assembly."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from motley.formats.grids import IQ4_GRID
from motley.formats.mxfp4 import MXFP4_LEVELS

INTERPRETED = knobs.runtime.interpret  # whether kernels run on the CPU, under TRITON_INTERPRET=1


@triton.jit
def _byte(word, i: tl.constexpr):
    """Byte i of an int32, with its sign."""
    return (word << (24 - 8 * i)) >> 24


@triton.jit
def dp4a(a, b, c, PLAIN: tl.constexpr):
    """c + the dot product of the four signed bytes of a with those of b."""
    if PLAIN:
        for i in tl.static_range(4):
            c += _byte(a, i) * _byte(b, i)
        return c
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.constexpr_function
def _pick_bytes(i, shift, mask, bits):
    """Byte i of two words as two float16: (byte >> shift & mask) ^ bits, two or three instructions for both."""
    selector = i | i << 4 | (4 + i) << 8 | (4 + i) << 12
    shifted = f"shr.b32 t, t, {shift};" if shift else ""
    return f"""{{ .reg .b32 t; prmt.b32 t, $1, $2, {selector}; {shifted}
        lop3.b32 $0, t, {mask << 16 | mask}, {bits << 16 | bits}, 0x6A; }}"""


@triton.jit
def biased_nibble(word, i: tl.constexpr, UPPER: tl.constexpr, PLAIN: tl.constexpr):
    """1024 + the low or upper nibble of byte i of each word, as float16: 0x6400 | n is 1024 + n."""
    shift: tl.constexpr = 4 if UPPER else 0
    if PLAIN:
        return (((word >> (8 * i + shift)) & 0xF) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            _pick_bytes(i, shift, 0x000F, 0x6400), "=r,r,r", [word], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.constexpr_function
def pick_nibbles(i, bits):
    """Picks both nibbles of byte i of two words, each pair as two float16: one permutation for both."""
    both = bits << 16 | bits
    return f"""{{ .reg .b32 t; prmt.b32 t, $2, $3, {i | (4 + i) << 8};
        lop3.b32 $0, t, 0x000F000F, {both}, 0xEA; lop3.b32 $1, t, 0x00F000F0, {both}, 0xEA; }}"""


@triton.jit
def nibbles_as_halves(word, i: tl.constexpr, BITS: tl.constexpr, PLAIN: tl.constexpr):
    """The nibbles of byte i of each word where they are, over BITS, as float16: low | BITS, upper << 4 | BITS.

    Over 0 they are subnormal: n · 2⁻²⁴ and n · 2⁻²⁰. Over 0x5800 they are 128 + n / 8 and 128 + 2 n.
    """
    if PLAIN:
        byte = word >> (8 * i)
        low, high = (byte & 0x0F) | BITS, (byte & 0xF0) | BITS
        return low.to(tl.int16).to(tl.float16, bitcast=True), high.to(tl.int16).to(tl.float16, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            pick_nibbles(i, BITS),
            "=r,=r,r,r",
            [word],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def byte_as_half(word, i: tl.constexpr, BITS: tl.constexpr, PLAIN: tl.constexpr):
    """128 + the signed byte i of each word, over BITS, as float16.

    Over 0 it is times 2⁻²⁴, over 0x5800 an eighth + 128, over 0x6400 as it is + 1024.
    """
    if PLAIN:
        return ((((word >> (8 * i)) & 0xFF) ^ 0x80) | BITS).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            _pick_bytes(i, 0, 0x00FF, BITS | 0x0080),
            "=r,r,r",
            [word],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )


@triton.constexpr_function
def _pick_masked(i, mask, bits):
    """Byte i of two 16-bit units, masked, over `bits`; a set bit of both is flipped."""
    both = bits << 16 | bits
    join = (
        f"xor.b32 $0, t, {both};" if mask == 0xFF else f"lop3.b32 $0, t, {mask << 16 | mask}, {both}, 0x6A;"
    )
    return f"{{ .reg .b32 t; prmt.b32 t, $1, 0, {0x4341 if i else 0x4240}; {join} }}"


@triton.jit
def part_as_half(unit, i: tl.constexpr, MASK: tl.constexpr, BITS: tl.constexpr, PLAIN: tl.constexpr):
    """The bits MASK of byte i of each 16-bit unit, over BITS, as float16; bits of both are flipped."""
    if PLAIN:
        byte = (unit.to(tl.int32) >> (8 * i)) & MASK
        return (byte ^ BITS).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            _pick_masked(i, MASK, BITS), "=r,r", [unit], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def finite_halves(x, PLAIN: tl.constexpr):
    """float16 as it is, but for infinities and NaN, which become something finite."""
    if PLAIN:
        return tl.where(tl.abs(x) <= 65504.0, x, 0.0)
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 most, t; mov.b32 most, 0x7BFF7BFF; min.f16x2 t, $1, most;
            mov.b32 most, 0xFBFFFBFF; max.f16x2 $0, t, most; }""",
            "=r,r",
            [x],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )


@triton.constexpr_function
def has_levels(kind):
    """Whether codes are indices of a table of levels."""
    return kind == "IQ4" or kind == "MXFP4"


@triton.constexpr_function
def _table(kind):
    return MXFP4_LEVELS if kind == "MXFP4" else IQ4_GRID.table


@triton.constexpr_function
def _eight_levels(first, kind):
    """Levels from `first` on as the bytes of an int64."""
    return int.from_bytes(
        bytes(level & 255 for level in _table(kind)[first : first + 8]), "little", signed=True
    )


@triton.constexpr_function
def _look_up_nibbles(first, kind):
    """Levels of four nibbles by byte permutations: of the lower and of the upper eight levels, then one of both."""
    words = [
        sum((level & 255) << 8 * i for i, level in enumerate(_table(kind)[n : n + 4])) for n in (0, 4, 8, 12)
    ]
    return f"""{{ .reg .b32 n, a, b, c; shr.b32 n, $1, {first}; and.b32 c, n, 0x7777;
        prmt.b32 a, {words[0]}, {words[1]}, c; prmt.b32 b, {words[2]}, {words[3]}, c;
        shr.b32 n, n, 1; lop3.b32 c, n, 0x4444, 0x3210, 0xEA; prmt.b32 $0, a, b, c; }}"""


@triton.jit
def levels_of(word, KIND: tl.constexpr, UPPER: tl.constexpr, PLAIN: tl.constexpr):
    """The levels of a word's four low or upper nibbles (its two halves), as four signed bytes."""
    FIRST: tl.constexpr = 16 if UPPER else 0
    if PLAIN:
        levels = tl.zeros(word.shape, tl.int64)
        for i in tl.static_range(4):
            code = (word >> (FIRST + 4 * i)) & 15
            eight = tl.where(code < 8, _eight_levels(0, KIND), _eight_levels(8, KIND))
            levels |= ((eight >> (8 * (code & 7))) & 255) << (8 * i)
        return levels.to(tl.int32)
    else:
        return tl.inline_asm_elementwise(
            _look_up_nibbles(FIRST, KIND), "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def multiply_add(a, b, c, PLAIN: tl.constexpr):
    """a · b + c of float16, rounded once."""
    if PLAIN:
        return (a.to(tl.float32) * b.to(tl.float32) + c.to(tl.float32)).to(tl.float16)
    else:
        return tl.fma(a, b, c)


@triton.jit
def low_half(pair):
    """The float16 in the low 16 bits of an int32."""
    return (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def high_half(pair):
    return (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)


# The low and the high halves of two words.
SPLIT_PAIRS = tl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")


@triton.jit
def both_halves(pair, PLAIN: tl.constexpr):
    """Both halves, for operands of the tensor cores: two neighbours at a time if they are in one register."""
    if PLAIN:
        return low_half(pair), high_half(pair)
    else:
        return tl.inline_asm_elementwise(
            SPLIT_PAIRS,
            "=&r,=r,r,r",
            [pair],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
