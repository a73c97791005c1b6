"""Bit tricks that the kernels share. Each has a plain twin for Triton's interpreter, which runs no inline assembly."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

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


@triton.jit
def biased_sixteenfold(word, i: tl.constexpr, PLAIN: tl.constexpr):
    """1024 + 16 times the upper nibble of byte i of each word, as float16: a shift less."""
    if PLAIN:
        return (((word >> (8 * i)) & 0xF0) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            _pick_bytes(i, 0, 0x00F0, 0x6400), "=r,r,r", [word], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def biased_byte(word, i: tl.constexpr, PLAIN: tl.constexpr):
    """1152 + the signed byte i of each word, as float16: 0x6400 | (c ^ 0x80) is 1024 + 128 + c."""
    if PLAIN:
        return (((word >> (8 * i)) & 0xFF) ^ 0x6480).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            _pick_bytes(i, 0, 0x00FF, 0x6480), "=r,r,r", [word], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def low_half(pair):
    """The float16 in the low 16 bits of an int32."""
    return (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def high_half(pair):
    return (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
