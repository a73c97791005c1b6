// The types of the KV cache, read 16 tokens of a 32-dim tile at a time.
//
// Keys come out with a token in each lane: as codes like a group of weights (formats.hpp), value = scale · code -
// minimum, or as floats (dim, token). Values come out token by token with a dim in each lane, and the scale apart.
#pragma once
#include "formats.hpp"
#include "../kernels.hpp"

namespace motley::MOTLEY_ISA {

constexpr int kTile = 32;  // dims
constexpr int kStretch = kLanes;  // tokens

// 16 tokens of a tile, as they lie in memory.
struct TileCells {
    const uint8_t* codes;
    const uint8_t* high_bits;
    const uint16_t* scale;
    const uint16_t* minimum;
};

struct KindShape {
    int code_bytes;  // of a token's tile
    bool has_high_bits, has_scale, has_minimum;
};

inline KindShape shape_of(int kind) {
    switch (kind) {
        case kCacheF32: return {128, false, false, false};
        case kCacheF16:
        case kCacheBF16: return {64, false, false, false};
        case kCacheQ8_0: return {32, false, true, false};
        case kCacheQ5_1: return {16, true, true, true};
        case kCacheQ5_0: return {16, true, true, false};
        case kCacheQ4_1: return {16, false, true, true};
        default: return {16, false, true, false};  // Q4_0, IQ4_NL
    }
}

inline bool is_float_kind(int kind) { return kind <= kCacheBF16; }

// 16 rows of 4 words → 4 vectors with a row in each lane.
inline void transpose4(const uint8_t* rows, u32x16 out[4]) {
    u32x16 in[4], low[2], high[2];
    for (int i = 0; i < 4; i++) in[i] = load<u32x16>(rows + 64 * i);
    for (int i = 0; i < 2; i++) {
        const u32x16 a = in[2 * i], b = in[2 * i + 1];  // eight rows
        low[i] = __builtin_shufflevector(a, b, 0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
        high[i] = __builtin_shufflevector(a, b, 2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
    }
    out[0] = __builtin_shufflevector(low[0], low[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    out[1] = __builtin_shufflevector(low[0], low[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    out[2] = __builtin_shufflevector(high[0], high[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    out[3] = __builtin_shufflevector(high[0], high[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

// Exchanges the lanes of a that have bit S in their number with those of b that have not.
template <int S>
inline void exchange(u32x16& a, u32x16& b) {
    const u32x16 x = a, y = b;
    if constexpr (S == 1) {
        a = __builtin_shufflevector(x, y, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        b = __builtin_shufflevector(x, y, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    } else if constexpr (S == 2) {
        a = __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        b = __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    } else if constexpr (S == 4) {
        a = __builtin_shufflevector(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        b = __builtin_shufflevector(x, y, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    } else {
        a = __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        b = __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
}

template <int N, int S = 1>
inline void transpose_square(u32x16 v[N]) {
#pragma GCC unroll 16
    for (int i = 0; i < N; i++)
        if (!(i & S)) exchange<S>(v[i], v[i + S]);
    if constexpr (2 * S < N) transpose_square<N, 2 * S>(v);
}

// 16 rows of 8 words: two squares side by side.
inline void transpose8(const uint8_t* rows, u32x16 out[8]) {
    for (int i = 0; i < 8; i++) {
        std::memcpy(&out[i], rows + 32 * i, 32);
        std::memcpy(reinterpret_cast<uint8_t*>(&out[i]) + 32, rows + 32 * (i + 8), 32);
    }
    transpose_square<8>(out);
}

// 16 rows of 16 words, `stride` bytes apart.
inline void transpose16(const uint8_t* rows, int stride, u32x16 out[16]) {
    for (int i = 0; i < 16; i++) out[i] = load<u32x16>(rows + stride * i);
    transpose_square<16>(out);
}

struct KeyCodes {  // of one tile
    u8x64 codes[8];
    f32x16 scale, minimum;
};

inline void read_key_codes(int kind, const TileCells& cells, KeyCodes& out) {
    out.scale = halves_to_float(load<u16x16>(cells.scale));
    if (kind == kCacheQ8_0) {
        u32x16 words[8];
        transpose8(cells.codes, words);
        for (int j = 0; j < 8; j++) out.codes[j] = reinterpret_cast<u8x64>(words[j]) ^ splat(uint8_t{0x80});
        out.minimum = out.scale * 128.0f;
        return;
    }
    alignas(64) u32x16 words[4];
    transpose4(cells.codes, words);
    nibbles(reinterpret_cast<const uint8_t*>(words), out.codes);
    switch (kind) {
        case kCacheQ4_0: out.minimum = out.scale * 8.0f; break;
        case kCacheIQ4_NL:
            for (auto& codes : out.codes) codes = look_up(kIq4Levels, codes);
            out.minimum = out.scale * 128.0f;
            break;
        case kCacheQ4_1: out.minimum = -halves_to_float(load<u16x16>(cells.minimum)); break;
        case kCacheQ5_0:
            add_fifth_bits(cells.high_bits, out.codes);
            out.minimum = out.scale * 16.0f;
            break;
        case kCacheQ5_1:
            add_fifth_bits(cells.high_bits, out.codes);
            out.minimum = -halves_to_float(load<u16x16>(cells.minimum));
            break;
    }
}

// The tile as (dim, token).
inline void read_key_floats(int kind, const TileCells& cells, float out[kTile][kStretch]) {
    u32x16 words[16];
    const auto* bytes = reinterpret_cast<const uint8_t*>(words);
    if (kind == kCacheF32) {
        for (int half = 0; half < 2; half++) {
            transpose16(cells.codes + 64 * half, 128, words);
            std::memcpy(out[16 * half], words, sizeof words);
        }
        return;
    }
    transpose16(cells.codes, 64, words);
#pragma GCC unroll 32
    for (int d = 0; d < kTile; d++) store(out[d], kind == kCacheF16 ? F16::column(bytes, d) : BF16::column(bytes, d));
}

// Token t's tile: 32 dims, before scaling.
template <int Kind>
inline void read_value(const TileCells& cells, int t, f32x16 v[2]) {
    if constexpr (Kind == kCacheF32) {
        for (int h = 0; h < 2; h++) v[h] = load<f32x16>(cells.codes + 128 * t + 64 * h);
    } else if constexpr (Kind == kCacheF16) {
        for (int h = 0; h < 2; h++) v[h] = halves_to_float(load<u16x16>(cells.codes + 64 * t + 32 * h));
    } else if constexpr (Kind == kCacheBF16) {
        for (int h = 0; h < 2; h++) v[h] = bf16_to_float(load<u16x16>(cells.codes + 64 * t + 32 * h));
    } else if constexpr (Kind == kCacheQ8_0) {
        for (int h = 0; h < 2; h++) v[h] = bytes_to_float(load<i8x16>(cells.codes + 32 * t + 16 * h));
    } else {
        const u8x16 pairs = load<u8x16>(cells.codes + 16 * t);
        u8x16 codes[2] = {pairs & 15, pairs >> 4};
        if constexpr (Kind == kCacheIQ4_NL) {
            for (int h = 0; h < 2; h++) v[h] = bytes_to_float(look_up(kIq4Levels, codes[h]));
        } else if constexpr (Kind == kCacheQ5_0 || Kind == kCacheQ5_1) {
            uint32_t bits;
            std::memcpy(&bits, cells.high_bits + 4 * t, 4);
            for (int h = 0; h < 2; h++) {
                const i32x16 fifth = ((splat(static_cast<int32_t>(bits >> 16 * h)) >> lane_numbers()) & 1) << 4;
                v[h] = to_float(widen(codes[h]) | fifth);
            }
        } else {
            for (int h = 0; h < 2; h++) v[h] = bytes_to_float(codes[h]);
        }
    }
}

// What a value's codes are to be multiplied with, and what is to be taken off: value = scale · code - minimum.
template <int Kind>
inline void read_value_scales(const TileCells& cells, f32x16& scale, f32x16& minimum) {
    scale = halves_to_float(load<u16x16>(cells.scale));
    minimum = f32x16{};
    if constexpr (Kind == kCacheQ4_0) minimum = scale * 8.0f;
    if constexpr (Kind == kCacheQ5_0) minimum = scale * 16.0f;
    if constexpr (Kind == kCacheIQ4_NL) minimum = scale * 128.0f;
    if constexpr (Kind == kCacheQ4_1 || Kind == kCacheQ5_1) minimum = -halves_to_float(load<u16x16>(cells.minimum));
}

}  // namespace motley::MOTLEY_ISA
