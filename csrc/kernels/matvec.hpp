// One token or a few: y = W·x, several groups of rows at once.
//
//     y[row] = Σ over steps  scale[row] · dx · Σ code·xcode  -  minimum[row] · Σ x
//
// Memory bandwidth limits this kernel. Each group is one stream: a thread reads `n` streams in turn, kVisit columns at
// a time, and may prefetch each stream. The fastest parameters for one token are measured (ReadPattern). Weights are decoded once, into
// registers, and used for all tokens. A token's sums are added in the same order for any number of tokens, here and in
// tile.hpp, so its result has the same bits in every batch.
#pragma once
#include "few.hpp"
#include "rows.hpp"

namespace motley::MOTLEY_ISA {

constexpr int64_t kVisit = 256;     // columns
constexpr int kFewAhead = 8 << 10;  // bytes: with several tokens; the processor's own prefetching stops while they are multiplied

// With one token and wide vectors, steps are taken in pairs by a loop: each load of codes then moves on by 512 bytes or less
// from one round to the next, which the processor's own prefetching follows. Unrolled over a block of 256 columns it moves by
// more than 2,000, and memory is read a quarter more slowly (Zen 5), although the computation alone is faster.
template <class F, int Tokens>
[[gnu::always_inline]] inline void dot_block(const uint8_t* block, const FewSteps<F, Tokens>& x, Ahead ahead, f32v (&y)[Tokens]) {
    constexpr int kBytes = F::kGroupBytes / F::kSteps;  // a few lines at a time: nine at once cost Q8_0 5 % (Zen 5)
    constexpr bool kInPairs = Tokens == 1 && kVectorBytes == 64 && F::kSteps > 2;
    constexpr int kTogether = kInPairs ? 2 : F::kSteps;
    Scales w[F::kSteps];
    if constexpr (kInPairs) {
#pragma GCC unroll 8
        for (int s = 0; s < F::kSteps; s++) F::scales(block, s, w[s]);
    }
#pragma GCC unroll 1
    for (int64_t first = 0; first < F::kSteps; first += kTogether) {
#pragma GCC unroll 8
        for (int64_t s = first; s < first + kTogether; s++) {
            const uint8_t* const next = block + s * kBytes + ahead.bytes;
            u8v codes[8];
            prefetch_weights<kBytes / 2, Tokens>(next, ahead);
            F::codes(block, s, codes);
            if constexpr (!kInPairs) F::scales(block, s, w[s]);
            dot_step<F>(codes, w[s], x, s, y);
            prefetch_weights<kBytes - kBytes / 2, Tokens>(next + kBytes / 2, ahead);
        }
    }
}

// `groups` is the first of n groups that follow each other; y is (group, token).
template <class F, int Tokens>
inline void matvec_quantized(const uint8_t* groups, int64_t stride, int n, Ahead ahead, const FewRows& x, int64_t n_columns, f32v* y) {
    for (int64_t first = 0; first < n_columns; first += kVisit) {
        const int64_t stop = n_columns - first < kVisit ? n_columns : first + kVisit;
        for (int i = 0; i < n; i++) {
            const uint8_t* block = groups + i * stride + first / F::kColumns * F::kGroupBytes;
            f32v acc[Tokens];
            for (int t = 0; t < Tokens; t++) acc[t] = y[i * Tokens + t];
            for (int64_t c = first; c < stop; c += F::kColumns, block += F::kGroupBytes)
                dot_block(block, FewSteps<F, Tokens>(x, c / kStep), ahead, acc);
            for (int t = 0; t < Tokens; t++) y[i * Tokens + t] = acc[t];
        }
    }
}

// One group, First … First + Count of the tokens: the kSums sums of n columns run side by side (panel.hpp).
template <class F, int Tokens, int First, int Count>
[[gnu::always_inline]] inline void dot_visit(const uint8_t* words, const float* values, int64_t n, Ahead ahead, f32v* y) {
    f32v acc[kSums][Count] = {};
    for (int t = 0; t < Count; t++) acc[0][t] = y[First + t];
    int64_t c = 0;
    for (; c + kSums <= n; c += kSums) {
        constexpr int kBytes = kSums * kWordBytes / F::kColumnsPerWord;
        if (!First) prefetch_weights<kBytes, Tokens>(words + c / kSums * kBytes + ahead.bytes, ahead);
#pragma GCC unroll 4
        for (int j = 0; j < kSums; j++) {
            const f32v w = F::column(words, c + j);
#pragma GCC unroll 4
            for (int t = 0; t < Count; t++) acc[j][t] += w * values[(c + j) * Tokens + First + t];
        }
    }
    for (; c < n; c++)
        for (int t = 0; t < Count; t++) acc[0][t] += F::column(words, c) * values[c * Tokens + First + t];
    for (int t = 0; t < Count; t++) y[First + t] = (acc[0][t] + acc[1][t]) + (acc[2][t] + acc[3][t]);
}

template <class F, int Tokens, int First = 0>
[[gnu::always_inline]] inline void dot_visits(const uint8_t* words, const float* values, int64_t n, Ahead ahead, f32v* y) {
    constexpr int kMost = kVectorBytes == 64 ? 4 : 2, kCount = Tokens - First < kMost ? Tokens - First : kMost;
    dot_visit<F, Tokens, First, kCount>(words, values, n, ahead, y);
    if constexpr (First + kCount < Tokens) dot_visits<F, Tokens, First + kCount>(words, values, n, ahead, y);
}

template <class F, int Tokens>
[[gnu::noinline]] void matvec_plain(const uint8_t* groups, int64_t stride, int n, Ahead ahead, const FewRows& x, int64_t n_columns, f32v* y) {
    for (int64_t first = 0; first < n_columns; first += kPlainVisit) {
        const int64_t count = n_columns - first < kPlainVisit ? n_columns - first : kPlainVisit;
        for (int i = 0; i < n; i++) {
            const uint8_t* words = groups + i * stride + first / F::kColumnsPerWord * kWordBytes;
            dot_visits<F, Tokens>(words, x.values + first * Tokens, count, ahead, y + i * Tokens);
        }
    }
}

// y (group, token): the products of n groups with x's tokens. `scratch`: kMatvecScratchBytes, for rows as in a file.
constexpr int64_t kMatvecScratchBytes = sizeof(RowTiles);
template <int Tokens>
inline void matvec(const MatMulPart& part, int64_t first_group, int n, const FewRows& x, int64_t n_columns, uint8_t* scratch, f32v* y) {
    const int64_t stride = group_bytes(part.format, n_columns);
    const uint8_t* groups = part.weight + first_group * stride;
    const Ahead ahead = Tokens > 1 ? Ahead{kFewAhead, false} : Ahead{part.pattern.fetch_ahead, part.pattern.is_once};
    for (int i = 0; i < n * Tokens; i++) y[i] = f32v{};
    if (is_rows(part.format))
        matvec_rows<Tokens>(groups, stride / kGroup, n, ahead, x, n_columns, scratch, y);
    else if (is_plain(part.format))
        with_plain(part.format, [&](auto f) { matvec_plain<decltype(f), Tokens>(groups, stride, n, ahead, x, n_columns, y); });
    else
        with_quantized(part.format, [&](auto f) { matvec_quantized<decltype(f), Tokens>(groups, stride, n, ahead, x, n_columns, y); });
}

}  // namespace motley::MOTLEY_ISA
