// The inner products of a matrix × matrix product: kGroups groups of 16 rows × a few tokens, over one panel of columns.
// The accumulators are (token, 16) for each group; they are read, added to and written back.
#pragma once
#include "panel.hpp"

namespace motley::MOTLEY_ISA {

constexpr int kTileTokens = 6;  // 2 groups × 6 tokens × (whole + float) accumulators: 24 of 32 registers

// y += Σ over steps  scale · dx · Σ code·xcode  -  minimum · Σ x
template <int Tokens, int Halves>
inline void tile_codes(const CodePanel* const panels[2], const Rows& x, int64_t n_columns, int64_t token, int64_t first,
                       int64_t n, float* const out[2]) {
    constexpr int kVectors = 8 / Halves;
    const int64_t n_steps = n_columns / kStep;
    const int8_t* codes[Tokens];
    const float* scales[Tokens];
    const float* sums[Tokens];
    f32x16 y[2][Tokens];
    for (int t = 0; t < Tokens; t++) {
        codes[t] = x.codes + (token + t) * n_columns + first;
        scales[t] = x.scales + (token + t) * n_steps + first / kStep;
        sums[t] = (Halves == 2 ? x.half_sums : x.sums) + ((token + t) * n_steps + first / kStep) * Halves;
        for (int g = 0; g < 2; g++) y[g][t] = load<f32x16>(out[g] + (token + t) * kGroup);
    }
    for (int64_t s = 0; s < n / kStep; s++)
        for (int h = 0; h < Halves; h++) {
            i32x16 acc[2][Tokens] = {};
            for (int j = h * kVectors; j < (h + 1) * kVectors; j++) {
                const u8x64 w0 = load<u8x64>(panels[0]->codes[s][j]), w1 = load<u8x64>(panels[1]->codes[s][j]);
#pragma GCC unroll 8
                for (int t = 0; t < Tokens; t++) {
                    const i32x16 four = splat4(codes[t] + s * kStep + 4 * j);
                    acc[0][t] = dot4(acc[0][t], w0, four);
                    acc[1][t] = dot4(acc[1][t], w1, four);
                }
            }
            for (int g = 0; g < 2; g++) {
                const f32x16 scale = load<f32x16>(panels[g]->scale[s][h]), minimum = load<f32x16>(panels[g]->minimum[s][h]);
#pragma GCC unroll 8
                for (int t = 0; t < Tokens; t++) {
                    y[g][t] += to_float(acc[g][t]) * (scale * scales[t][s]);
                    y[g][t] -= minimum * sums[t][s * Halves + h];
                }
            }
        }
    for (int t = 0; t < Tokens; t++)
        for (int g = 0; g < 2; g++) store(out[g] + (token + t) * kGroup, y[g][t]);
}

// y += Σ w · x
template <int Tokens>
inline void tile_floats(const FloatPanel* const panels[2], const Rows& x, int64_t token, int64_t first, int64_t n,
                        float* const out[2]) {
    f32x16 y[2][Tokens];
    const float* values[Tokens];
    for (int t = 0; t < Tokens; t++) {
        values[t] = x.values + (token + t) * x.stride + first;
        for (int g = 0; g < 2; g++) y[g][t] = load<f32x16>(out[g] + (token + t) * kGroup);
    }
    for (int64_t c = 0; c < n; c++) {
        const f32x16 w0 = load<f32x16>(panels[0]->values[c]), w1 = load<f32x16>(panels[1]->values[c]);
#pragma GCC unroll 16
        for (int t = 0; t < Tokens; t++) {
            y[0][t] += w0 * values[t][c];
            y[1][t] += w1 * values[t][c];
        }
    }
    for (int t = 0; t < Tokens; t++)
        for (int g = 0; g < 2; g++) store(out[g] + (token + t) * kGroup, y[g][t]);
}

// Calls tile(constant<T>) for T tokens at a time until n are done.
template <int T>
struct Count {
    static constexpr int value = T;
};

template <int Most, class Tile>
inline void in_tiles(int64_t n, Tile&& tile) {
    int64_t token = 0;
    for (; token + Most <= n; token += Most) tile(Count<Most>{}, token);
    if constexpr (Most > 1) in_tiles<Most / 2>(n - token, [&](auto count, int64_t t) { tile(count, token + t); });
}

}  // namespace motley::MOTLEY_ISA
