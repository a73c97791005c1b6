// The types of the KV cache, read 16 tokens of a 32-dim tile at a time.
//
// Keys come out with a token in each lane: as codes like a group of weights (formats.hpp), value = scale · code -
// minimum, or as floats (dim, token). Values come out token by token with a dim in each lane, and the scale apart.
#pragma once
#include "../kernels.hpp"
#include "formats.hpp"
#include "transpose.hpp"

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
    u32x16 rows[4], words[4];
    std::memcpy(rows, cells.codes, sizeof rows);
    transpose4(rows, words);
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
