// Quantized weights in the layout that kernels read: groups of rows.
//
// A *group* is kLanes rows of the matrix (16 with AVX-512, 8 with AVX2, else 4), a vector lane each. All fields of a
// GGUF block are multiples of four bytes (except a lone scale of one or two bytes), so a group's block consists of the
// rows' blocks with their 4-byte words transposed:
//
//     [scales of all rows, where the format has a lone one] [word 0 of all rows] [word 1 of all rows] …
//
// The number of bytes is the same, and one vector load gives the same four columns of all rows, as dot.hpp needs.
//
// A format decodes step `s` (32 columns) of a block into eight vectors of codes (up to kMaxCode, see dot.hpp), where
// vector j holds columns 4j … 4j + 3, and into scales and minima:
//
//     weight = scale · code - minimum          for each row, and for each half step where kHalves is 2
#pragma once
#include "dot.hpp"

namespace motley::MOTLEY_ISA {

constexpr int kGroup = kLanes;  // rows
constexpr int kStep = 32;       // columns
constexpr int kWordBytes = 4 * kGroup;

struct Scales {
    f32v scale[2], minimum[2];  // of the first and second 16 columns; only [0] is used where kHalves is 1
};

inline u8v word(const uint8_t* words, int64_t i) { return load<u8v>(words + kWordBytes * i); }
inline u32v word32(const uint8_t* words, int64_t i) { return load<u32v>(words + kWordBytes * i); }

// Sizes of a format: kColumns and kBytes of one row's block, where its lone scale is (-1: none), kHalves, kMaxCode. A
// lone scale is a float16, or one byte.
template <int Columns, int Bytes, int HalfAt, int Halves, int MaxCode, int LoneBytes = 2>
struct Layout {
    static constexpr int kColumns = Columns, kBytes = Bytes, kHalfAt = HalfAt, kHalves = Halves, kMaxCode = MaxCode;
    static constexpr int kLoneBytes = LoneBytes;
    static constexpr bool kIsFull = MaxCode == kMaxFull;
    static constexpr bool kHasMinimum = !(kIsFull && kFullIsSigned);  // otherwise the minimum is 0
    static constexpr int kSteps = Columns / kStep;
    static constexpr int kGroupBytes = Bytes * kGroup;
    static constexpr int kWordsAt = HalfAt < 0 ? 0 : LoneBytes * kGroup;
    static const uint8_t* words(const uint8_t* block) { return block + kWordsAt; }
    static f32v lone_half(const uint8_t* block) { return halves_to_float(load<u16l>(block)); }
};

// 4-bit codes of 32 columns in four words: columns 0-15 in the low halves, 16-31 in the high ones.
inline void nibbles(const uint8_t* words, u8v codes[8]) {
    for (int j = 0; j < 4; j++) {
        const u8v w = word(words, j);
        codes[j] = w & splat(uint8_t{15});
        codes[j + 4] = shift_right(w, 4) & splat(uint8_t{15});
    }
}

// The fifth bits of 32 columns are a string of 32 bits.
inline void add_fifth_bits(const uint8_t* words, u8v codes[8]) {
    const u32v bits = word32(words, 0);
    for (int j = 0; j < 8; j++) {
        const u32v four = (bits >> (4 * j)) & splat(uint32_t{15});
        const u32v spread = (four | four << 7 | four << 14 | four << 21) & splat(uint32_t{0x01010101});
        codes[j] |= reinterpret_cast<u8v>(spread << 4);
    }
}

struct Q8_0 : Layout<32, 34, 0, 1, kMaxFull> {
    static void codes(const uint8_t* block, int, u8v out[8]) {
        for (int j = 0; j < 8; j++) out[j] = word(words(block), j) ^ splat(kFullOffset);
    }
    static void scales(const uint8_t* block, int, Scales& s) {
        s.scale[0] = lone_half(block);
        s.minimum[0] = s.scale[0] * kFullOffset;
    }
};

struct Q4_0 : Layout<32, 18, 0, 1, 15> {
    static void codes(const uint8_t* block, int, u8v out[8]) { nibbles(words(block), out); }
    static void scales(const uint8_t* block, int, Scales& s) {
        s.scale[0] = lone_half(block);
        s.minimum[0] = s.scale[0] * 8.0f;
    }
};

struct Q4_1 : Layout<32, 20, -1, 1, 15> {
    static void codes(const uint8_t* block, int, u8v out[8]) { nibbles(block + kWordBytes, out); }
    static void scales(const uint8_t* block, int, Scales& s) {
        const u32v pair = word32(block, 0);
        s.scale[0] = low_half_to_float(pair);
        s.minimum[0] = -low_half_to_float(pair >> 16);
    }
};

struct Q5_0 : Layout<32, 22, 0, 1, 31> {
    static void codes(const uint8_t* block, int, u8v out[8]) {
        nibbles(words(block) + kWordBytes, out);
        add_fifth_bits(words(block), out);
    }
    static void scales(const uint8_t* block, int, Scales& s) {
        s.scale[0] = lone_half(block);
        s.minimum[0] = s.scale[0] * 16.0f;
    }
};

struct Q5_1 : Layout<32, 24, -1, 1, 31> {
    static void codes(const uint8_t* block, int, u8v out[8]) {
        nibbles(block + 2 * kWordBytes, out);
        add_fifth_bits(block + kWordBytes, out);
    }
    static void scales(const uint8_t* block, int64_t step, Scales& s) { Q4_1::scales(block, step, s); }
};

// The levels of IQ4_NL and IQ4_XS, plus 128; and the same as full codes.
constexpr u8x16 kIq4Levels = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr u8x16 kIq4Codes = kIq4Levels ^ static_cast<uint8_t>(128 - kFullOffset);

struct IQ4_NL : Layout<32, 18, 0, 1, kMaxFull> {
    static void codes(const uint8_t* block, int, u8v out[8]) {
        nibbles(words(block), out);
        for (int j = 0; j < 8; j++) out[j] = look_up(kIq4Codes, out[j]);
    }
    static void scales(const uint8_t* block, int64_t step, Scales& s) { Q8_0::scales(block, step, s); }
};

// The levels of MXFP4 in half units, plus 12.
constexpr u8x16 kMxfp4Levels = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

struct MXFP4 : Layout<32, 17, 0, 1, 24, 1> {
    static void codes(const uint8_t* block, int, u8v out[8]) {
        nibbles(words(block), out);
        for (int j = 0; j < 8; j++) out[j] = look_up(kMxfp4Levels, out[j]);
    }
    // The lone byte e is the unit 2^(e - 128): e - 1 as a float's exponent. The two smallest, below 1e-38, count as 0.
    static void scales(const uint8_t* block, int, Scales& s) {
        const i32v e = widen(load<u8l>(block));
        s.scale[0] = as<f32v>((e < splat(int32_t{2}) ? i32v{} : e - 1) << 23);
        s.minimum[0] = s.scale[0] * 12.0f;
    }
};

struct IQ4_XS : Layout<256, 136, -1, 1, kMaxFull> {
    static void codes(const uint8_t* block, int64_t step, u8v out[8]) {
        nibbles(block + (2 + 4 * step) * kWordBytes, out);
        for (int j = 0; j < 8; j++) out[j] = look_up(kIq4Codes, out[j]);
    }
    // word 0: float16 d, then two upper bits of each step's scale; word 1: four lower bits of each
    static void scales(const uint8_t* block, int64_t step, Scales& s) {
        const u32v first = word32(block, 0), low = word32(block, 1);
        const u32v six = ((low >> (4 * step)) & splat(uint32_t{15})) |
                           ((first >> (16 + 2 * step)) & splat(uint32_t{3})) << 4;
        s.scale[0] = low_half_to_float(first) * (to_float(six) - 32.0f);
        s.minimum[0] = s.scale[0] * kFullOffset;
    }
};

// Q4_K and Q5_K: word 0 is float16 d and dmin; words 1-3 hold eight 6-bit scales a and minima b:
//   word 1   bytes a[0-3], with the upper two bits of a[4-7] on top;   word 2   the same of b
//   word 3   bytes with the lower four bits of a[4-7], and of b[4-7] above them
inline void six_bit_scales(const uint8_t* block, int64_t step, Scales& s) {
    const u32v pair = word32(block, 0), a = word32(block, 1), b = word32(block, 2), rest = word32(block, 3);
    const int i = step % 4;
    u32v scale = byte_of(a, i), minimum = byte_of(b, i);
    if (step < 4) {
        scale &= splat(uint32_t{63});
        minimum &= splat(uint32_t{63});
    } else {
        const u32v low = byte_of(rest, i);
        scale = (low & splat(uint32_t{15})) | (scale >> 6) << 4;
        minimum = (low >> 4) | (minimum >> 6) << 4;
    }
    s.scale[0] = low_half_to_float(pair) * to_float(scale);
    s.minimum[0] = low_half_to_float(pair >> 16) * to_float(minimum);
}

// 4-bit codes: eight words for two steps, the first in the low halves.
inline void nibble_pairs(const uint8_t* words, int64_t step, u8v codes[8]) {
    for (int j = 0; j < 8; j++)
        codes[j] = shift_right(word(words, step / 2 * 8 + j), step % 2 * 4) & splat(uint8_t{15});
}

struct Q4_K : Layout<256, 144, -1, 1, 15> {
    static void codes(const uint8_t* block, int64_t step, u8v out[8]) { nibble_pairs(block + 4 * kWordBytes, step, out); }
    static void scales(const uint8_t* block, int64_t step, Scales& s) { six_bit_scales(block, step, s); }
};

struct Q5_K : Layout<256, 176, -1, 1, 31> {
    static void codes(const uint8_t* block, int64_t step, u8v out[8]) {
        nibble_pairs(block + 12 * kWordBytes, step, out);
        for (int j = 0; j < 8; j++)  // bit `step` of each byte
            out[j] |= shift_left(shift_right(word(block, 4 + j), step) & splat(uint8_t{1}), 4);
    }
    static void scales(const uint8_t* block, int64_t step, Scales& s) { six_bit_scales(block, step, s); }
};

// 2-bit codes: eight words for four steps.
inline u8v two_bits(const uint8_t* words, int64_t step, int j) {
    return shift_right(word(words, step / 4 * 8 + j), step % 4 * 2) & splat(uint8_t{3});
}

struct Q6_K : Layout<256, 210, 208, 2, 63> {
    // words 0-31: lower four bits, 16 words for four steps; words 32-47: upper two; words 48-51: sixteen int8 scales
    static void codes(const uint8_t* block, int64_t step, u8v out[8]) {
        const uint8_t* low = words(block) + (step / 4 * 16 + step % 2 * 8) * kWordBytes;
        for (int j = 0; j < 8; j++) {
            const u8v four = shift_right(word(low, j), step % 4 / 2 * 4) & splat(uint8_t{15});
            out[j] = four | shift_left(two_bits(words(block) + 32 * kWordBytes, step, j), 4);
        }
    }
    static void scales(const uint8_t* block, int64_t step, Scales& s) {
        const i32v four = reinterpret_cast<i32v>(word32(words(block), 48 + step / 2));
        const f32v d = lone_half(block);
        for (int h = 0; h < 2; h++) {
            const int byte = step % 2 * 2 + h;
            s.scale[h] = d * to_float((four << (24 - 8 * byte)) >> 24);
            s.minimum[h] = s.scale[h] * 32.0f;
        }
    }
};

struct Q3_K : Layout<256, 110, 108, 2, 7> {
    // words 0-7: third bits; words 8-23: lower two; words 24-26: sixteen 6-bit scales, less 32
    static void codes(const uint8_t* block, int64_t step, u8v out[8]) {
        for (int j = 0; j < 8; j++) {
            const u8v third = shift_right(word(words(block), j), step) & splat(uint8_t{1});
            out[j] = two_bits(words(block) + 8 * kWordBytes, step, j) | shift_left(third, 2);
        }
    }
    static void scales(const uint8_t* block, int64_t step, Scales& s) {
        const f32v d = lone_half(block);
        const u32v upper = word32(words(block), 26);
        for (int h = 0; h < 2; h++) {
            const int i = 2 * step + h;  // of 16
            const u32v low = byte_of(word32(words(block), 24 + i / 4 % 2), i % 4) >> (i / 8 * 4);
            const u32v high = byte_of(upper, i % 4) >> (i / 4 * 2);
            const u32v six = (low & splat(uint32_t{15})) | (high & splat(uint32_t{3})) << 4;
            s.scale[h] = d * (to_float(six) - 32.0f);
            s.minimum[h] = s.scale[h] * 4.0f;
        }
    }
};

struct Q2_K : Layout<256, 84, -1, 2, 3> {
    // words 0-3: sixteen bytes of 4-bit scale and 4-bit minimum; words 4-19: codes; word 20: float16 d and dmin
    static void codes(const uint8_t* block, int64_t step, u8v out[8]) {
        for (int j = 0; j < 8; j++) out[j] = two_bits(block + 4 * kWordBytes, step, j);
    }
    static void scales(const uint8_t* block, int64_t step, Scales& s) {
        const u32v pair = word32(block, 20);
        for (int h = 0; h < 2; h++) {
            const u32v byte = byte_of(word32(block, step / 2), step % 2 * 2 + h);
            s.scale[h] = low_half_to_float(pair) * to_float(byte & splat(uint32_t{15}));
            s.minimum[h] = low_half_to_float(pair >> 16) * to_float(byte >> 4);
        }
    }
};

// Plain numbers: a word is one column of F32, or two of F16 and BF16.
struct F32 {
    static constexpr int kColumnsPerWord = 1;
    static f32v column(const uint8_t* words, int i) { return load<f32v>(words + kWordBytes * i); }
};

struct F16 {
    static constexpr int kColumnsPerWord = 2;
    static f32v column(const uint8_t* words, int i) {
        return low_half_to_float(word32(words, i / 2) >> (i % 2 * 16));
    }
};

struct BF16 {
    static constexpr int kColumnsPerWord = 2;
    static f32v column(const uint8_t* words, int i) {
        return reinterpret_cast<f32v>((word32(words, i / 2) >> (i % 2 * 16)) << 16);
    }
};

}  // namespace motley::MOTLEY_ISA
