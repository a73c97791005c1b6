// A row of activations as int8 for dot products with quantized weights:
//
//     scale = max|x| / 127 over 32 columns,  code = round(x / scale),  Σ code over 16,  scale · Σ code over 16 and over 32
//
// 32 columns with a NaN or an infinity get a NaN as scale, so every product with them is NaN and the error is visible.
#pragma once
#include "../kernels.hpp"
#include "simd.hpp"

namespace motley::MOTLEY_ISA {

inline void quantize_row(const float* x, int64_t n, int8_t* codes, float* scales, float* sums, float* half_sums, int32_t* code_sums) {
    constexpr int kVectors = 32 / kLanes;
    constexpr int32_t kInfinity = 0x7f800000;  // its bits; those of a NaN are larger, and those of smaller numbers smaller
    for (int64_t b = 0; b < n / 32; b++) {
        f32v v[kVectors];
        i32v most = {};
        for (int i = 0; i < kVectors; i++) {
            v[i] = load<f32v>(x + 32 * b + kLanes * i);
            const i32v bits = as<i32v>(vabs(v[i]));
            most = bits > most ? bits : most;
        }
        const int32_t bits = max_lanes(most);
        const bool is_finite = bits < kInfinity;
        float largest;
        std::memcpy(&largest, &bits, 4);
        const float scale = largest / 127.0f;
        const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
        int32_t halves[2] = {};
        for (int i = 0; i < kVectors; i++) {
            const f32v rounded = is_finite ? round_even(v[i] * inverse) : f32v{};
            const i8l own = narrow(__builtin_convertvector(rounded, i32v));
            store(codes + 32 * b + kLanes * i, own);
            halves[2 * i / kVectors] += sum_lanes(own);
        }
        for (int h = 0; h < 2; h++) {
            code_sums[2 * b + h] = halves[h];
            half_sums[2 * b + h] = static_cast<float>(halves[h]) * scale;
        }
        scales[b] = is_finite ? scale : NAN;
        sums[b] = is_finite ? half_sums[2 * b] + half_sums[2 * b + 1] : NAN;
    }
}

// Columns first … first + n of a row of `n_columns`; x is where they begin, and `first` a multiple of 32.
inline void quantize_stretch(const float* x, const Rows& out, int64_t row, int64_t n_columns, int64_t first, int64_t n) {
    const int64_t step = row * (n_columns / 32) + first / 32;
    quantize_row(x, n, out.codes + row * n_columns + first, out.scales + step, out.sums + step, out.half_sums + 2 * step,
                 out.code_sums + 2 * step);
}

inline void quantize_row(const float* x, const Rows& out, int64_t row, int64_t n) { quantize_stretch(x, out, row, n, 0, n); }

}  // namespace motley::MOTLEY_ISA
