// Reference results of kernels, as simple as possible: one value at a time, in double precision, from bytes in GGUF's
// layout. There are no vectors, groups or panels here.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../kernels.hpp"

namespace motley::reference {

inline uint16_t u16_at(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }

inline double half(uint16_t h) {
    const double sign = h & 0x8000 ? -1 : 1;
    const int exponent = h >> 10 & 31, fraction = h & 0x3ff;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}

inline double half_at(const uint8_t* p) { return half(u16_at(p)); }

inline double bfloat(uint16_t h) {
    const uint32_t bits = uint32_t{h} << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

constexpr int kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

constexpr int kMxfp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // in half units

// 4 bits of 32 values in 16 bytes: value i in the low half of byte i, value i + 16 in the high half of it.
inline int nibble(const uint8_t* bytes, int i) { return i < 16 ? bytes[i] & 15 : bytes[i - 16] >> 4; }

inline int bit(const uint8_t* bytes, int i) { return bytes[i / 8] >> i % 8 & 1; }

// The 6-bit scale j of eight, and the minimum j, of Q4_K and Q5_K.
inline void six_bits(const uint8_t* s, int j, int& scale, int& minimum) {
    if (j < 4) {
        scale = s[j] & 63;
        minimum = s[j + 4] & 63;
    } else {
        scale = (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
        minimum = s[j + 4] >> 4 | s[j] >> 6 << 4;
    }
}

// Value i of a block.
inline double weight(int format, const uint8_t* b, int i) {
    switch (format) {
        case kF32: {
            float value;
            std::memcpy(&value, b + 4 * i, 4);
            return value;
        }
        case kF16: return half_at(b + 2 * i);
        case kBF16: return bfloat(u16_at(b + 2 * i));
        case kQ8_0: return half_at(b) * static_cast<int8_t>(b[2 + i]);
        case kQ4_0: return half_at(b) * (nibble(b + 2, i) - 8);
        case kQ4_1: return half_at(b) * nibble(b + 4, i) + half_at(b + 2);
        case kQ5_0: return half_at(b) * ((nibble(b + 6, i) | bit(b + 2, i) << 4) - 16);
        case kQ5_1: return half_at(b) * (nibble(b + 8, i) | bit(b + 4, i) << 4) + half_at(b + 2);
        case kIQ4_NL: return half_at(b) * kIq4[nibble(b + 2, i)];
        case kMXFP4: return std::ldexp(kMxfp4[nibble(b + 1, i)], b[0] - 128);
        case kIQ4_XS: {
            const int step = i / 32, low = b[4 + step / 2] >> step % 2 * 4 & 15, high = u16_at(b + 2) >> 2 * step & 3;
            return half_at(b) * ((low | high << 4) - 32) * kIq4[nibble(b + 8 + 16 * step, i % 32)];
        }
        case kQ2_K: {
            const int code = b[16 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3, pair = b[i / 16];
            return half_at(b + 80) * (pair & 15) * code - half_at(b + 82) * (pair >> 4);
        }
        case kQ3_K: {
            const int two = b[32 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3, third = b[i % 32] >> i / 32 & 1, s = i / 16;
            const int low = s < 8 ? b[96 + s] & 15 : b[96 + s - 8] >> 4, high = b[104 + s % 4] >> s / 4 * 2 & 3;
            return half_at(b + 108) * ((low | high << 4) - 32) * ((two | third << 2) - 4);
        }
        case kQ4_K:
        case kQ5_K: {
            const uint8_t* codes = b + (format == kQ4_K ? 16 : 48) + i / 64 * 32 + i % 32;
            const int fifth = format == kQ5_K ? b[16 + i % 32] >> i / 32 & 1 : 0;
            int scale, minimum;
            six_bits(b + 4, i / 32, scale, minimum);
            return half_at(b) * scale * ((*codes >> i / 32 % 2 * 4 & 15) | fifth << 4) - half_at(b + 2) * minimum;
        }
        case kQ6_K: {
            const int low = b[i / 128 * 64 + i % 64] >> i % 128 / 64 * 4 & 15, high = b[128 + i / 128 * 32 + i % 32] >> i % 128 / 32 * 2 & 3;
            return half_at(b + 208) * static_cast<int8_t>(b[192 + i / 16]) * ((low | high << 4) - 32);
        }
    }
    return NAN;
}

// Value i of a tile of 32 in the KV cache; `cell` is the number of the tile in its planes.
inline double cached(const CacheStoreView& store, int64_t cell, int i) {
    const uint8_t* codes = store.codes;
    const auto scale = [&] { return half(store.scale[cell]); };
    const auto five = [&] { return nibble(codes + 16 * cell, i) | bit(store.high_bits + 4 * cell, i) << 4; };
    switch (store.kind) {
        case kCacheF32: return weight(kF32, codes + 128 * cell, i);
        case kCacheF16: return weight(kF16, codes + 64 * cell, i);
        case kCacheBF16: return weight(kBF16, codes + 64 * cell, i);
        case kCacheQ8_0: return scale() * static_cast<int8_t>(codes[32 * cell + i]);
        case kCacheQ5_1: return scale() * five() + half(store.minimum[cell]);
        case kCacheQ5_0: return scale() * (five() - 16);
        case kCacheQ4_1: return scale() * nibble(codes + 16 * cell, i) + half(store.minimum[cell]);
        case kCacheQ4_0: return scale() * (nibble(codes + 16 * cell, i) - 8);
        case kCacheIQ4_NL: return scale() * kIq4[nibble(codes + 16 * cell, i)];
    }
    return NAN;
}

// The largest allowed error of a stored value, relative to the largest of its 32 values.
inline double cache_precision(int kind) {
    switch (kind) {
        case kCacheF32: return 0;
        case kCacheF16: return 1.0 / 1024;
        case kCacheBF16: return 1.0 / 128;
        case kCacheQ8_0: return 1.0 / 200;
        case kCacheQ5_1:
        case kCacheQ5_0: return 1.0 / 14;
        default: return 1.0 / 5;  // four bits; the levels of IQ4_NL are up to 24 of 127 apart
    }
}

inline double apply(int function, double x) {
    switch (function) {
        case kSilu: return x / (1 + std::exp(-x));
        case kGelu: return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
        case kGeluTanh: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
        case kRelu: return x > 0 ? x : 0;
        case kSigmoid: return 1 / (1 + std::exp(-x));
        case kTanh: return std::tanh(x);
    }
    return x;
}

// gate(first) · second.
inline double gated(int function, double first, double second) {
    if (function != kClampedSwiglu) return apply(function, first) * second;
    first = std::min(first, 7.0);
    return first / (1 + std::exp(-1.702 * first)) * (std::clamp(second, -7.0, 7.0) + 1);
}

// The orthonormal Walsh–Hadamard transform of n values: entry (i, j) of the matrix is -1 to the power of the common
// bits.
inline std::vector<double> hadamard(const std::vector<double>& x) {
    std::vector<double> y(x.size());
    for (size_t i = 0; i < x.size(); i++)
        for (size_t j = 0; j < x.size(); j++)
            y[i] += x[j] * (__builtin_popcountll(i & j) % 2 ? -1 : 1) / std::sqrt(static_cast<double>(x.size()));
    return y;
}

}  // namespace motley::reference
