// One token: y = W·x, several groups of rows at once.
//
//     y[row] = Σ over steps  scale[row] · dx · Σ code·xcode  -  minimum[row] · Σ x
//
// Memory bandwidth limits this kernel. Each group is one stream: a thread reads `n` streams in turn, kVisit columns at
// a time, and may prefetch each stream. The fastest parameters are measured (ReadPattern).
#pragma once
#include "rows.hpp"
#include "with_format.hpp"

namespace motley::MOTLEY_ISA {

constexpr int64_t kVisit = 256;     // columns
constexpr int kFarAhead = 4 << 10;  // bytes: prefetches from this distance on go to the second-level cache

template <int Bytes>
[[gnu::always_inline]] inline void fetch_at_distance(const uint8_t* p, int ahead) {
    if (ahead >= kFarAhead)
        fetch<2>(p + ahead, Bytes);
    else if (ahead)
        fetch<1>(p + ahead, Bytes);
}

template <class F>
[[gnu::always_inline]] inline f32v dot_block(const uint8_t* block, const int8_t* x, const float* scales, const float* sums,
                                               int ahead, f32v y) {
#pragma GCC unroll 8
    for (int s = 0; s < F::kSteps; s++) {
        u8v codes[8];
        Scales w;
        F::codes(block, s, codes);
        F::scales(block, s, w);
        constexpr int kBytes = F::kGroupBytes / F::kSteps;  // a few bytes at a time: a burst of prefetches would stall
        fetch_at_distance<kBytes>(block + s * kBytes, ahead);
        constexpr int kVectors = 8 / F::kHalves;
        for (int h = 0; h < F::kHalves; h++) {
            i32v acc[1][1];
            dot<F::kMaxCode, kVectors>(
                acc, h * kVectors, [&](int, int j) { return codes[j]; }, [&](int, int j) { return splat4(x + s * kStep + 4 * j); });
            y += to_float(acc[0][0]) * (w.scale[h] * scales[s]);
            if constexpr (F::kHasMinimum) y -= w.minimum[h] * sums[s * F::kHalves + h];
        }
    }
    return y;
}

// `groups` is the first of n groups that follow each other.
template <class F>
inline void matvec_quantized(const uint8_t* groups, int64_t stride, int n, int ahead, const Rows& x, int64_t n_columns,
                             f32v* y) {
    const float* sums = F::kHalves == 2 ? x.half_sums : x.sums;
    for (int64_t first = 0; first < n_columns; first += kVisit) {
        const int64_t stop = n_columns - first < kVisit ? n_columns : first + kVisit;
        for (int i = 0; i < n; i++) {
            const uint8_t* block = groups + i * stride + first / F::kColumns * F::kGroupBytes;
            f32v acc = y[i];
            for (int64_t c = first; c < stop; c += F::kColumns, block += F::kGroupBytes)
                acc = dot_block<F>(block, x.codes + c, x.scales + c / kStep, sums + c / kStep * F::kHalves, ahead, acc);
            y[i] = acc;
        }
    }
}

template <class F>
inline void matvec_plain(const uint8_t* groups, int64_t stride, int n, int ahead, const Rows& x, int64_t n_columns,
                         f32v* y) {
    for (int64_t first = 0; first < n_columns; first += 64) {
        const int64_t stop = n_columns - first < 64 ? n_columns : first + 64;
        for (int i = 0; i < n; i++) {
            const uint8_t* words = groups + i * stride + first / F::kColumnsPerWord * kWordBytes;
            f32v acc[4] = {y[i]};
            int64_t c = 0;
            for (; c + 4 <= stop - first; c += 4) {
                constexpr int kBytes = 4 * kWordBytes / F::kColumnsPerWord;
                fetch_at_distance<kBytes>(words + c / 4 * kBytes, ahead);
                for (int j = 0; j < 4; j++) acc[j] += F::column(words, c + j) * x.values[first + c + j];
            }
            for (; c < stop - first; c++) acc[0] += F::column(words, c) * x.values[first + c];
            y[i] = (acc[0] + acc[1]) + (acc[2] + acc[3]);
        }
    }
}

inline void matvec(const MatMulPart& part, int64_t first_group, int n, const Rows& x, int64_t n_columns, f32v* y) {
    const int64_t stride = group_bytes(part.format, n_columns);
    const uint8_t* groups = part.weight + first_group * stride;
    const int ahead = part.pattern.fetch_ahead;
    for (int i = 0; i < n; i++) y[i] = f32v{};
    if (is_rows(part.format))
        matvec_rows(groups, stride / kGroup, n, x, n_columns, y);
    else if (is_plain(part.format))
        with_plain(part.format, [&](auto f) { matvec_plain<decltype(f)>(groups, stride, n, ahead, x, n_columns, y); });
    else
        with_quantized(part.format, [&](auto f) { matvec_quantized<decltype(f)>(groups, stride, n, ahead, x, n_columns, y); });
}

}  // namespace motley::MOTLEY_ISA
