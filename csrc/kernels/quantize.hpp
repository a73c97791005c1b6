// A row of activations as int8 for dot products with quantized weights:
//
//     scale = max|x| / 127 over 32 columns,  code = round(x / scale),  sum = scale · Σ code over 32, and over 16
//
// 32 columns with a NaN or an infinity get a NaN for scale, so every product with them is NaN: damage shows.
#pragma once
#include "../kernels.hpp"
#include "simd.hpp"

namespace motley::MOTLEY_ISA {

inline void quantize_row(const float* x, int64_t n, int8_t* codes, float* scales, float* sums, float* half_sums) {
    for (int64_t b = 0; b < n / 32; b++) {
        const f32x16 v[2] = {load<f32x16>(x + 32 * b), load<f32x16>(x + 32 * b + 16)};
        const float most = max_lanes(vmax(vabs(v[0]), vabs(v[1])));
        const f32x16 odd = (v[0] - v[0]) + (v[1] - v[1]);  // zeros, or NaN where something is not finite
        const float damage = sum_lanes(odd);
        const float scale = most / 127.0f;
        const float inverse = most > 1e-30f ? 127.0f / most : 0.0f;
        float sum = 0;
        for (int h = 0; h < 2; h++) {
            const f32x16 rounded = round_even(v[h] * inverse);
            const i32x16 whole = __builtin_convertvector(damage == 0 ? rounded : f32x16{}, i32x16);
            store(codes + 32 * b + 16 * h, narrow(whole));
            half_sums[2 * b + h] = sum_lanes(to_float(whole)) * scale;
            sum += half_sums[2 * b + h];
        }
        scales[b] = damage == 0 ? scale : NAN;
        sums[b] = damage == 0 ? sum : NAN;
    }
}

inline void quantize_row(const float* x, const Rows& out, int64_t row, int64_t n) {
    const int64_t steps = n / 32;
    quantize_row(x, n, out.codes + row * n, out.scales + row * steps, out.sums + row * steps, out.half_sums + row * 2 * steps);
}

}  // namespace motley::MOTLEY_ISA
