// The inner products of a matrix × matrix product: two groups of rows × a few tokens, over one panel of columns.
// The accumulators are (token, row) for each group; they are read, added to and written back.
#pragma once
#include "few.hpp"
#include "panel.hpp"

namespace motley::MOTLEY_ISA {

// With 32 registers: 2 groups × 6 tokens × (whole + float) accumulators. With 16, the floats are in memory, and the
// whole ones take 8 beside two vectors of codes, their magnitudes, activations and products.
constexpr int kTileTokens = kVectorBytes == 64 ? 6 : 4;
constexpr int kFloatTokens = kVectorBytes == 64 ? 12 : 6;

// y += Σ over steps  scale · dx · Σ code·xcode  -  minimum · Σ x        HasMinimum: whether a panel has minima other than 0
template <int Tokens, int Halves, int MaxCode, bool HasMinimum>
inline void tile_codes(const CodePanel* const panels[2], const Rows& x, int64_t n_columns, int64_t token, int64_t first,
                       int64_t n, float* const out[2]) {
    constexpr int kVectors = 8 / Halves;
    const int64_t n_steps = n_columns / kStep;
    // One moving pointer for all tokens, and a fixed distance for each token: one pointer per token would need too many
    // registers.
    const int8_t* codes = x.codes + token * n_columns + first;
    const float* scales = x.scales + token * n_steps + first / kStep;
    const float* sums = (Halves == 2 ? x.half_sums : x.sums) + (token * n_steps + first / kStep) * Halves;
    [[maybe_unused]] const int32_t* code_sums = x.code_sums + (token * n_steps + first / kStep) * 2;
    const CodePanel::Step* steps[2] = {panels[0]->steps, panels[1]->steps};
    [[maybe_unused]] const i32v offsets[2] = {splat(panels[0]->offset ? -1 : 0), splat(panels[1]->offset ? -1 : 0)};  // all bits, or none
    f32v y[2][Tokens];
    for (int t = 0; t < Tokens; t++)
        for (int g = 0; g < 2; g++) y[g][t] = load<f32v>(out[g] + (token + t) * kGroup);
    for (int64_t s = 0; s < n / kStep; s++) {
        for (int h = 0; h < Halves; h++) {
            const auto four = [&](int t, int j) { return splat4(codes + t * n_columns + 4 * j); };
            i32v acc[2][Tokens];
            if constexpr (kCutsFull && MaxCode == kMaxFull) {
                i32v low[2][Tokens];
                dot<15, kVectors>(acc, h * kVectors, [&](int g, int j) { return load<u8v>(panels[g]->high[s][j]); }, four);
                pin_pointer(codes);  // forces a new load: keeping the codes would take 32 registers
                dot<15, kVectors>(low, h * kVectors, [&](int g, int j) { return load<u8v>(steps[g]->codes[j]); }, four);
                for (int t = 0; t < Tokens; t++) {
                    const int32_t* two = code_sums + t * n_steps * 2;
                    const i32v sum = Halves == 2 ? splat(two[h]) : splat(two[0]) + splat(two[1]);
                    static_assert(kCutOffset == 128);
                    for (int g = 0; g < 2; g++) acc[g][t] = (acc[g][t] << 4) + low[g][t] - ((sum << 7) & offsets[g]);
                }
            } else {
                dot<MaxCode, kVectors>(acc, h * kVectors, [&](int g, int j) { return load<u8v>(steps[g]->codes[j]); }, four);
            }
            for (int g = 0; g < 2; g++) {
                const f32v scale = load<f32v>(steps[g]->scale[h]), minimum = load<f32v>(steps[g]->minimum[h]);
#pragma GCC unroll 8
                for (int t = 0; t < Tokens; t++) {
                    y[g][t] += to_float(acc[g][t]) * (scale * scales[t * n_steps]);
                    if constexpr (HasMinimum) y[g][t] -= minimum * sums[t * n_steps * Halves + h];
                }
            }
        }
        codes += kStep;
        scales++;
        sums += Halves;
        code_sums += 2;
        steps[0]++;
        steps[1]++;
    }
    for (int t = 0; t < Tokens; t++)
        for (int g = 0; g < 2; g++) store(out[g] + (token + t) * kGroup, y[g][t]);
}

// y += Σ w · x: the sums of each visit (panel.hpp), one after the other.
template <int Tokens>
inline void tile_floats(const FloatPanel* const panels[2], const Rows& x, int64_t token, int64_t first, int64_t n,
                        float* const out[2]) {
    const float* values[Tokens];
    for (int t = 0; t < Tokens; t++) values[t] = x.values + (token + t) * x.stride + first;
    // n columns of the panels from `at` on, which are columns c, c + step, … of x.
    const auto add_columns = [&](f32v (&y)[2][Tokens], int64_t at, int64_t c, int64_t n, int64_t step) {
        for (; n > 0; at++, c += step, n--) {
            const f32v w0 = load<f32v>(panels[0]->values[at]), w1 = load<f32v>(panels[1]->values[at]);
#pragma GCC unroll 16
            for (int t = 0; t < Tokens; t++) {
                y[0][t] += w0 * values[t][c];
                y[1][t] += w1 * values[t][c];
            }
        }
    };
    for (int64_t begin = 0; begin < n; begin += kPlainVisit) {
        const int64_t count = n - begin < kPlainVisit ? n - begin : kPlainVisit, share = count / kSums, end = begin + kSums * share;
        f32v sums[kSums - 1][2][Tokens];
        for (int j = 0; j < kSums; j++) {
            f32v y[2][Tokens];
            for (int t = 0; t < Tokens; t++)
                for (int g = 0; g < 2; g++) y[g][t] = j ? f32v{} : load<f32v>(out[g] + (token + t) * kGroup);
            add_columns(y, begin + j * share, begin + j, share, kSums);
            if (j == 0) add_columns(y, end, end, begin + count - end, 1);
            for (int t = 0; t < Tokens; t++)
                for (int g = 0; g < 2; g++) {
                    if (j < kSums - 1)
                        sums[j][g][t] = y[g][t];
                    else
                        store(out[g] + (token + t) * kGroup, (sums[0][g][t] + sums[1][g][t]) + (sums[2][g][t] + y[g][t]));
                }
        }
    }
}

// Calls tile(Count<T>) for T tokens at a time until n are done.
template <int Most, class Tile>
inline void in_tiles(int64_t n, Tile&& tile) {
    int64_t token = 0;
    for (; token + Most <= n; token += Most) tile(Count<Most>{}, token);
    if constexpr (Most > 1) in_tiles<Most / 2>(n - token, [&](auto count, int64_t t) { tile(count, token + t); });
}

}  // namespace motley::MOTLEY_ISA
