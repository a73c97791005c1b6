// Products of bytes on ARM (dot.hpp): signed by signed, so full codes are signed, and small codes need no change.
//
//   dotprod   one instruction multiplies four columns of four rows with four of one token
//   i8mm      one instruction multiplies eight columns of two rows with eight of two tokens: twice as much
#pragma once
#include <arm_neon.h>

#include "simd.hpp"

namespace motley::MOTLEY_ISA {

inline i32v dot4(i32v acc, u8v w, i32v x) {
    return as<i32v>(vdotq_s32(as<int32x4_t>(acc), as<int8x16_t>(w), as<int8x16_t>(x)));
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

// As `dot`, for pairs of tokens: a register of codes is [row r: columns 0-7] [row r + 1: columns 0-7], one of
// activations [token t: columns 0-7] [token t + 1: columns 0-7], and one of sums r·t, r·(t + 1), (r + 1)·t, (r + 1)·(t
// + 1).
template <int N, int Groups, int Tokens, class W, class X>
[[gnu::always_inline]] inline void dot_pairs(i32v (&acc)[Groups][Tokens], int first, W&& w, X&& x) {
    static_assert(N % 2 == 0);
    constexpr int kPairs = Tokens / 2;
    int32x4_t sums[Groups][kPairs][2];  // of rows 0 and 1, of rows 2 and 3
#pragma GCC unroll 16
    for (int p = 0; p < kPairs; p++)
        for (int g = 0; g < Groups; g++) sums[g][p][0] = sums[g][p][1] = vdupq_n_s32(0);
#pragma GCC unroll 4
    for (int j = first; j < first + N; j += 2) {
        int8x16_t rows[Groups][2];
        for (int g = 0; g < Groups; g++) {
            const int32x4_t a = as<int32x4_t>(w(g, j)), b = as<int32x4_t>(w(g, j + 1));
            rows[g][0] = vreinterpretq_s8_s32(vzip1q_s32(a, b));
            rows[g][1] = vreinterpretq_s8_s32(vzip2q_s32(a, b));
        }
#pragma GCC unroll 16
        for (int p = 0; p < kPairs; p++) {
            const auto eight = [&](int t) { return vzip1q_s32(as<int32x4_t>(x(t, j)), as<int32x4_t>(x(t, j + 1))); };
            const int32x4_t both = vcombine_s32(vget_low_s32(eight(2 * p)), vget_low_s32(eight(2 * p + 1)));
            for (int g = 0; g < Groups; g++)
                for (int h = 0; h < 2; h++) sums[g][p][h] = vmmlaq_s32(sums[g][p][h], rows[g][h], vreinterpretq_s8_s32(both));
        }
    }
#pragma GCC unroll 16
    for (int p = 0; p < kPairs; p++)
        for (int g = 0; g < Groups; g++) {
            acc[g][2 * p] = as<i32v>(vuzp1q_s32(sums[g][p][0], sums[g][p][1]));
            acc[g][2 * p + 1] = as<i32v>(vuzp2q_s32(sums[g][p][0], sums[g][p][1]));
        }
    if constexpr (Tokens % 2)
        for (int g = 0; g < Groups; g++) {
            acc[g][Tokens - 1] = i32v{};
            for (int j = first; j < first + N; j++) acc[g][Tokens - 1] = dot4(acc[g][Tokens - 1], w(g, j), x(Tokens - 1, j));
        }
}

#endif

}  // namespace motley::MOTLEY_ISA
