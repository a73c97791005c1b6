// The activations of a few tokens, interleaved: the address of each token's values has a fixed distance from the first
// token's, so that kernels need one pointer for all of them. One token's rows are interleaved as they are.
#pragma once
#include "with_format.hpp"

namespace motley::MOTLEY_ISA {

// Tokens whose sums stay in registers, beside the codes of a step.
constexpr int kFewTokens = kVectorBytes == 64 ? 8 : 4;

// Where weights are prefetched: `bytes` ahead of the current read, 0: nowhere.
struct Ahead {
    int bytes;
    bool is_once;  // see ReadPattern
};

// Prefetches the lines that begin within p … p + Bytes. Where kernels prefetch all of their data in such pieces, each line
// is prefetched once: twice costs 3 to 8 % of the speed of memory (Zen 5), as every prefetch waits for a free place.
template <int Level, int Bytes>
[[gnu::always_inline]] inline void fetch_lines(const uint8_t* p) {
    constexpr int kLine = 64, kWhole = Bytes / kLine * kLine;
    const uintptr_t start = reinterpret_cast<uintptr_t>(p), first = (start + kLine - 1) / kLine * kLine;
    fetch<Level>(reinterpret_cast<const void*>(first), kWhole);
    if (Bytes > kWhole && first + kWhole < start + Bytes) fetch<Level>(reinterpret_cast<const void*>(first + kWhole), kLine);
}

// Prefetches `Bytes` of weights from p on, which is `ahead` of the current read. With several tokens, the first-level cache is
// for the activations.
template <int Bytes, int Tokens>
[[gnu::always_inline]] inline void prefetch_weights(const uint8_t* p, Ahead ahead) {
    if (!ahead.bytes) return;
    if constexpr (Tokens > 1)
        fetch_lines<2, Bytes>(p);
    else if (ahead.is_once)
        fetch_lines<kOnce, Bytes>(p);
    else
        fetch_lines<1, Bytes>(p);
}

struct FewRows {
    const float* values;     // (column, token); null if they are not needed
    const int8_t* codes;     // (step, token, column of the step); null if they are not needed
    const float* scales;     // (step, token)
    const float* sums;       // (step, token)
    const float* half_sums;  // (step, token, half)
};

template <int T>
struct Count {
    static constexpr int value = T;
};

// Calls `visit` with a number of tokens that kernels are made for, n or a little more.
template <class Visit>
inline void with_few_tokens(int64_t n, Visit&& visit) {
    if (n <= 1) return visit(Count<1>{});
    if (n == 2) return visit(Count<2>{});
    if (n == 3) return visit(Count<3>{});
    if constexpr (kFewTokens == 4) return visit(Count<4>{});
    if (n == 4) return visit(Count<4>{});
    if (n <= 6) return visit(Count<6>{});
    return visit(Count<8>{});
}

inline int64_t few_tokens(int64_t n) {
    int64_t count = 0;
    with_few_tokens(n, [&](auto tokens) { count = tokens.value; });
    return count;
}

inline int64_t few_bytes(int64_t n_tokens, int64_t n_columns, bool has_values, bool has_codes) {
    const int64_t n_steps = n_columns / kStep;
    return few_tokens(n_tokens) * (n_columns * (has_values ? 4 : 0) + n_steps * (has_codes ? kStep + 16 : 0)) + 64;
}

// Interleaves tokens first … first + n of x, in `memory` of few_bytes. The last token fills the places of those that
// with_few_tokens adds.
inline FewRows interleave_tokens(const Rows& x, int64_t first, int64_t n, int64_t n_columns, bool has_values, bool has_codes, uint8_t* memory) {
    const int64_t n_steps = n_columns / kStep, count = few_tokens(n);
    auto* const values = reinterpret_cast<float*>(memory);
    float* const scales = values + (has_values ? count * n_columns : 0);
    float* const sums = scales + count * n_steps;
    float* const half_sums = sums + count * n_steps;
    auto* const codes = reinterpret_cast<int8_t*>(half_sums + 2 * count * n_steps);
    for (int64_t t = 0; t < count; t++) {
        const int64_t token = first + (t < n ? t : n - 1);
        if (has_values)
            for (int64_t c = 0; c < n_columns; c++) values[c * count + t] = x.values[token * x.stride + c];
        for (int64_t s = 0; has_codes && s < n_steps; s++) {
            const int64_t from = token * n_steps + s, to = s * count + t;
            std::memcpy(codes + to * kStep, x.codes + from * kStep, kStep);
            scales[to] = x.scales[from];
            sums[to] = x.sums[from];
            std::memcpy(half_sums + 2 * to, x.half_sums + 2 * from, 2 * sizeof(float));
        }
    }
    return {has_values ? values : nullptr, has_codes ? codes : nullptr, scales, sums, half_sums};
}

// Where step `step` of all tokens begins, for weights in format F.
template <class F, int Tokens>
struct FewSteps {
    const int8_t* codes;
    const float* scales;
    const float* sums;

    FewSteps(const FewRows& x, int64_t step)
        : codes(x.codes + step * Tokens * kStep), scales(x.scales + step * Tokens),
          sums((F::kHalves == 2 ? x.half_sums : x.sums) + step * Tokens * F::kHalves) {}
};

// y[token] += Σ over step s of x: a group's decoded weights times all tokens.
template <class F, int Tokens>
[[gnu::always_inline]] inline void dot_step(const u8v (&codes)[8], const Scales& w, const FewSteps<F, Tokens>& x, int64_t s, f32v (&y)[Tokens]) {
    constexpr int kVectors = 8 / F::kHalves;
    for (int h = 0; h < F::kHalves; h++) {
        i32v acc[1][Tokens];
        dot<F::kMaxCode, kVectors>(
            acc, h * kVectors, [&](int, int j) { return codes[j]; },
            [&](int t, int j) { return splat4(x.codes + (s * Tokens + t) * kStep + 4 * j); });
#pragma GCC unroll 8
        for (int t = 0; t < Tokens; t++) {
            y[t] += to_float(acc[0][t]) * (w.scale[h] * x.scales[s * Tokens + t]);
            if constexpr (F::kHasMinimum) y[t] -= w.minimum[h] * x.sums[(s * Tokens + t) * F::kHalves + h];
        }
    }
}

}  // namespace motley::MOTLEY_ISA
