// One token: y = W·x, several groups of 16 rows at once.
//
//     y[row] = Σ over steps  scale[row] · dx · Σ code·xcode  -  minimum[row] · Σ x
//
// This is bound by memory. Each group is a stream of its own: a thread walks `n` of them side by side, a stretch of
// kVisit columns at a time, and fetches each stream ahead; one stream alone leaves half of the bandwidth unused.
#pragma once
#include "with_format.hpp"

namespace motley::MOTLEY_ISA {

constexpr int kStreams = 8;
constexpr int64_t kVisit = 256;        // columns
constexpr int64_t kFetchAhead = 1024;  // bytes

template <class F>
[[gnu::always_inline]] inline f32x16 dot_block(const uint8_t* block, const int8_t* x, const float* scales, const float* sums, f32x16 y) {
#pragma GCC unroll 8
    for (int s = 0; s < F::kSteps; s++) {
        u8x64 codes[8];
        Scales w;
        F::codes(block, s, codes);
        F::scales(block, s, w);
        constexpr int kVectors = 8 / F::kHalves;
        for (int h = 0; h < F::kHalves; h++) {
            i32x16 acc = {};
            for (int j = h * kVectors; j < (h + 1) * kVectors; j++) acc = dot4(acc, codes[j], splat4(x + s * kStep + 4 * j));
            y += to_float(acc) * (w.scale[h] * scales[s]);
            y -= w.minimum[h] * sums[s * F::kHalves + h];
        }
    }
    return y;
}

// `groups` is the first of n groups that follow each other.
template <class F>
inline void matvec_quantized(const uint8_t* groups, int64_t stride, int n, const Rows& x, int64_t n_columns, f32x16* y) {
    const float* sums = F::kHalves == 2 ? x.half_sums : x.sums;
    for (int64_t first = 0; first < n_columns; first += kVisit) {
        const int64_t stop = n_columns - first < kVisit ? n_columns : first + kVisit;
        for (int i = 0; i < n; i++) {
            const uint8_t* block = groups + i * stride + first / F::kColumns * F::kGroupBytes;
            fetch(block + kFetchAhead, (stop - first) / F::kColumns * F::kGroupBytes);
            f32x16 acc = y[i];
            for (int64_t c = first; c < stop; c += F::kColumns, block += F::kGroupBytes)
                acc = dot_block<F>(block, x.codes + c, x.scales + c / kStep, sums + c / kStep * F::kHalves, acc);
            y[i] = acc;
        }
    }
}

template <class F>
inline void matvec_plain(const uint8_t* groups, int64_t stride, int n, const Rows& x, int64_t n_columns, f32x16* y) {
    for (int64_t first = 0; first < n_columns; first += 64) {
        const int64_t stop = n_columns - first < 64 ? n_columns : first + 64;
        for (int i = 0; i < n; i++) {
            const uint8_t* words = groups + i * stride + first / F::kColumnsPerWord * kWordBytes;
            fetch(words + kFetchAhead, (stop - first) / F::kColumnsPerWord * kWordBytes);
            f32x16 acc[4] = {y[i]};
            int64_t c = 0;
            for (; c + 4 <= stop - first; c += 4)
                for (int j = 0; j < 4; j++) acc[j] += F::column(words, c + j) * x.values[first + c + j];
            for (; c < stop - first; c++) acc[0] += F::column(words, c) * x.values[first + c];
            y[i] = (acc[0] + acc[1]) + (acc[2] + acc[3]);
        }
    }
}

inline void matvec(const MatMulPart& part, int64_t first_group, int n, const Rows& x, int64_t n_columns, f32x16* y) {
    const int64_t stride = group_bytes(part.format, n_columns);
    const uint8_t* groups = part.weight + first_group * stride;
    for (int i = 0; i < n; i++) y[i] = f32x16{};
    if (is_plain(part.format))
        with_plain(part.format, [&](auto f) { matvec_plain<decltype(f)>(groups, stride, n, x, n_columns, y); });
    else
        with_quantized(part.format, [&](auto f) { matvec_quantized<decltype(f)>(groups, stride, n, x, n_columns, y); });
}

}  // namespace motley::MOTLEY_ISA
