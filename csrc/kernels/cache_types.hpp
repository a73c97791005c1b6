// The types of the KV cache, read kLanes tokens of a 32-dim tile at a time.
//
// Keys are read with a token in each lane: as codes like a group of weights (formats.hpp), value = scale · code -
// minimum, or as floats (dim, token). Values are read token by token with a dim in each lane, and a separate scale.
#pragma once
#include "../kernels.hpp"
#include "formats.hpp"
#include "transpose.hpp"

namespace motley::MOTLEY_ISA {

constexpr int kTile = 32;  // dims
constexpr int kStretch = kLanes;  // tokens

// A stretch of a tile: its addresses in the cache.
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
    u8v codes[8];
    f32v scale, minimum;
};

// The largest code that read_key_codes returns.
inline int max_code_of(int kind) {
    switch (kind) {
        case kCacheQ8_0:
        case kCacheIQ4_NL: return kMaxFull;
        case kCacheQ5_0:
        case kCacheQ5_1: return 31;
        default: return 15;
    }
}

inline void read_key_codes(int kind, const TileCells& cells, KeyCodes& out) {
    out.scale = halves_to_float(load<u16l>(cells.scale));
    u32v words[8];
    if (kind == kCacheQ8_0) {
        transpose_words<8>([&](int t) { return cells.codes + 32 * t; }, words);
        for (int j = 0; j < 8; j++) out.codes[j] = as<u8v>(words[j]) ^ splat(kFullOffset);
        out.minimum = out.scale * kFullOffset;
        return;
    }
    transpose_dense4(cells.codes, words);
    nibbles(reinterpret_cast<const uint8_t*>(words), out.codes);
    switch (kind) {
        case kCacheQ4_0: out.minimum = out.scale * 8.0f; break;
        case kCacheIQ4_NL:
            for (auto& codes : out.codes) codes = look_up(kIq4Codes, codes);
            out.minimum = out.scale * kFullOffset;
            break;
        case kCacheQ4_1: out.minimum = -halves_to_float(load<u16l>(cells.minimum)); break;
        case kCacheQ5_0:
            add_fifth_bits(cells.high_bits, out.codes);
            out.minimum = out.scale * 16.0f;
            break;
        case kCacheQ5_1:
            add_fifth_bits(cells.high_bits, out.codes);
            out.minimum = -halves_to_float(load<u16l>(cells.minimum));
            break;
    }
}

// Keys of the tile as floats (dim, token).
inline void read_key_floats(int kind, const TileCells& cells, float out[kTile][kStretch]) {
    if (kind == kCacheF32) {
        u32v words[16];
        for (int half = 0; half < 2; half++) {
            transpose_words<16>([&](int t) { return cells.codes + 128 * t + 64 * half; }, words);
            std::memcpy(out[16 * half], words, sizeof words);
        }
        return;
    }
    const auto row = [&](int t) { return cells.codes + 64 * t; };
    if (kind == kCacheF16)
        transpose_halves(row, [&](int d, u16l keys) { store(out[d], halves_to_float(keys)); });
    else
        transpose_halves(row, [&](int d, u16l keys) { store(out[d], bf16_to_float(keys)); });
}

// The level (plus 128) of each lane's code.
inline f32v iq4_levels(i32v codes) {
    return to_float(as<i32v>(look_up(kIq4Levels, as<u8v>(codes))) & 0xff);
}

constexpr int kValueVectors = 16 / kLanes;  // of half a tile

// Half `half` of token t's tile: 16 dims, before scaling.
template <int Kind>
inline void read_value(const TileCells& cells, int t, int half, f32v v[kValueVectors]) {
    const int first = 32 * t + 16 * half;
    if constexpr (Kind == kCacheF32) {
        for (int i = 0; i < kValueVectors; i++) v[i] = load<f32v>(cells.codes + 4 * (first + kLanes * i));
    } else if constexpr (Kind == kCacheF16) {
        for (int i = 0; i < kValueVectors; i++) v[i] = halves_to_float(load<u16l>(cells.codes + 2 * (first + kLanes * i)));
    } else if constexpr (Kind == kCacheBF16) {
        for (int i = 0; i < kValueVectors; i++) v[i] = bf16_to_float(load<u16l>(cells.codes + 2 * (first + kLanes * i)));
    } else if constexpr (Kind == kCacheQ8_0) {
        for (int i = 0; i < kValueVectors; i++) v[i] = bytes_to_float(load<i8l>(cells.codes + first + kLanes * i));
    } else {
        for (int i = 0; i < kValueVectors; i++) {
            i32v code = widen(load<u8l>(cells.codes + 16 * t + kLanes * i));
            code = half ? code >> 4 : code & 15;
            if constexpr (Kind == kCacheQ5_0 || Kind == kCacheQ5_1) {
                uint32_t bits;
                std::memcpy(&bits, cells.high_bits + 4 * t, 4);
                code |= ((splat(static_cast<int32_t>(bits >> (16 * half + kLanes * i))) >> lane_numbers()) & 1) << 4;
            }
            v[i] = Kind == kCacheIQ4_NL ? iq4_levels(code) : to_float(code);
        }
    }
}

// Scale and minimum of a value's codes: value = scale · code - minimum.
template <int Kind>
inline void read_value_scales(const TileCells& cells, f32v& scale, f32v& minimum) {
    scale = halves_to_float(load<u16l>(cells.scale));
    minimum = f32v{};
    if constexpr (Kind == kCacheQ4_0) minimum = scale * 8.0f;
    if constexpr (Kind == kCacheQ5_0) minimum = scale * 16.0f;
    if constexpr (Kind == kCacheIQ4_NL) minimum = scale * 128.0f;
    if constexpr (Kind == kCacheQ4_1 || Kind == kCacheQ5_1) minimum = -halves_to_float(load<u16l>(cells.minimum));
}

}  // namespace motley::MOTLEY_ISA
