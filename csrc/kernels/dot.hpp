// Products of bytes: codes of weights (or keys) times int8 codes of activations, four columns in each lane.
//
//     acc[lane] += Σ over the lane's four bytes of w · x            |x| <= 127
//
// There are two kinds of codes. *Small* codes are unsigned, up to F::kMaxCode < 128. *Full* codes have all 8 bits;
// their sign depends on the multiply instruction: full codes are signed if kFullIsSigned, and otherwise unsigned with
// 128 added (the formats do this).
//
//   VNNI                one instruction does it all: unsigned · signed.
//   AVX2, AVX-512       maddubs sums two products in 16 bits and must not saturate. Small codes allow more:
//                       kRun vectors of products are added in 16 bits, before one step to 32. Full codes move the sign of
//                       w to x: |w| · (sign(w) · x), which fits, as 2 · 128 · 127 < 2^15. AVX-512 has no instruction for
//                       that: where codes are used many times (panel.hpp), full ones are cut into two small ones of 4 bits
//                       there (kCutsFull). With AVX2 that is 8 % slower (prompts of llama-1b Q8_0, Zen 5).
//   ARM                 signed · signed, see dot_neon.hpp.
//   others              plain loops over lanes, compiled as they are.
#pragma once
#include "simd.hpp"
#if defined(__ARM_FEATURE_DOTPROD)
#define MOTLEY_DOT_NEON
#include "dot_neon.hpp"
#endif

namespace motley::MOTLEY_ISA {

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define MOTLEY_DOT_VNNI
#elif defined(__AVX2__)
#define MOTLEY_DOT_PAIRS
#endif

#if defined(MOTLEY_DOT_PAIRS)
constexpr bool kFullIsSigned = true, kCutsFull = kVectorBytes == 64;
#elif defined(MOTLEY_DOT_NEON)
constexpr bool kFullIsSigned = true, kCutsFull = false;
#else
constexpr bool kFullIsSigned = false, kCutsFull = false;
#endif
constexpr uint8_t kFullOffset = kFullIsSigned ? 0 : 128;  // the number added to a full code's value
constexpr int kMaxFull = 255;

// The number of vectors of products whose sum fits into 16 bits: 8, 4, 2 or 1. All if nothing is summed in 16 bits.
constexpr int run_of(int max_code) {
#if !defined(MOTLEY_DOT_PAIRS)
    return 8;
#endif
    if (max_code == kMaxFull) return 1;
    const int n = 32767 / (2 * 127 * max_code);
    return n >= 8 ? 8 : (n >= 4 ? 4 : 2);
}

// Four consecutive bytes in every lane.
inline i32v splat4(const int8_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return splat(x);
}

#if defined(MOTLEY_DOT_PAIRS)

#if MOTLEY_VECTOR_BYTES == 64
using Register = __m512i;
inline i16v multiply_pairs(u8v w, i32v x) { return as<i16v>(_mm512_maddubs_epi16(as<Register>(w), as<Register>(x))); }
inline i32v add_pairs(i16v v) { return as<i32v>(_mm512_madd_epi16(as<Register>(v), _mm512_set1_epi16(1))); }
inline u8v magnitude(u8v w) { return as<u8v>(_mm512_abs_epi8(as<Register>(w))); }
inline i32v with_sign_of(u8v w, i32v x) {
    const Register v = as<Register>(x);
    return as<i32v>(_mm512_mask_sub_epi8(v, _mm512_movepi8_mask(as<Register>(w)), _mm512_setzero_si512(), v));
}
#else
using Register = __m256i;
inline i16v multiply_pairs(u8v w, i32v x) { return as<i16v>(_mm256_maddubs_epi16(as<Register>(w), as<Register>(x))); }
inline i32v add_pairs(i16v v) { return as<i32v>(_mm256_madd_epi16(as<Register>(v), _mm256_set1_epi16(1))); }
inline u8v magnitude(u8v w) { return as<u8v>(_mm256_abs_epi8(as<Register>(w))); }
inline i32v with_sign_of(u8v w, i32v x) { return as<i32v>(_mm256_sign_epi8(as<Register>(x), as<Register>(w))); }
#endif

#elif !defined(MOTLEY_DOT_NEON)

// The same in one go, for unsigned w.
inline i32v dot4(i32v acc, u8v w, i32v x) {
#if defined(MOTLEY_DOT_VNNI) && MOTLEY_VECTOR_BYTES == 64
    return as<i32v>(_mm512_dpbusd_epi32(as<__m512i>(acc), as<__m512i>(w), as<__m512i>(x)));
#elif defined(__AVXVNNI__)
    return as<i32v>(_mm256_dpbusd_avx_epi32(as<__m256i>(acc), as<__m256i>(w), as<__m256i>(x)));
#elif defined(MOTLEY_DOT_VNNI)
    return as<i32v>(_mm256_dpbusd_epi32(as<__m256i>(acc), as<__m256i>(w), as<__m256i>(x)));
#else
    for (int i = 0; i < 4; i++) acc += as<i32v>(byte_of(as<u32v>(w), i)) * ((x << (24 - 8 * i)) >> 24);
    return acc;
#endif
}

#endif

// Hides the pointer's value from the compiler, so that values loaded before are loaded again.
template <class T>
[[gnu::always_inline]] inline void pin_pointer(T*& p) {
    asm("" : "+r"(p));
}

// acc[g][t] = Σ over j = first … first + N - 1 of w(g, j) · x(t, j): vector j of group g's codes, none above MaxCode,
// and the four bytes of token t that belong to it.
template <int MaxCode, int N, int Groups, int Tokens, class W, class X>
[[gnu::always_inline]] inline void dot(i32v (&acc)[Groups][Tokens], int first, W&& w, X&& x) {
#if defined(MOTLEY_DOT_PAIRS)
    constexpr bool kIsFull = MaxCode == kMaxFull;
    constexpr int kRun = run_of(MaxCode) < N ? run_of(MaxCode) : N;
#pragma GCC unroll 8
    for (int start = 0; start < N; start += kRun) {
        i16v sums[Groups][Tokens];
#pragma GCC unroll 8
        for (int j = 0; j < kRun; j++) {
            u8v codes[Groups], sizes[Groups];
            for (int g = 0; g < Groups; g++) {
                codes[g] = w(g, first + start + j);
                sizes[g] = kIsFull ? magnitude(codes[g]) : codes[g];
            }
#pragma GCC unroll 16
            for (int t = 0; t < Tokens; t++) {
                const i32v four = x(t, first + start + j);
                for (int g = 0; g < Groups; g++) {
                    const i16v products = multiply_pairs(sizes[g], kIsFull ? with_sign_of(codes[g], four) : four);
                    sums[g][t] = j ? sums[g][t] + products : products;
                    keep_in_register(sums[g][t]);
                }
            }
        }
#pragma GCC unroll 16
        for (int t = 0; t < Tokens; t++)
            for (int g = 0; g < Groups; g++) {
                const i32v sum = add_pairs(sums[g][t]);
                acc[g][t] = start ? acc[g][t] + sum : sum;
                keep_in_register(acc[g][t]);
            }
    }
#else
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (Tokens > 1) return dot_pairs<N>(acc, first, w, x);
#endif
#pragma GCC unroll 16
    for (int t = 0; t < Tokens; t++)
        for (int g = 0; g < Groups; g++) acc[g][t] = i32v{};
#pragma GCC unroll 8
    for (int j = first; j < first + N; j++) {
        u8v codes[Groups];
        for (int g = 0; g < Groups; g++) codes[g] = w(g, j);
#pragma GCC unroll 16
        for (int t = 0; t < Tokens; t++) {
            const i32v four = x(t, j);
            for (int g = 0; g < Groups; g++) acc[g][t] = dot4(acc[g][t], codes[g], four);
        }
    }
#endif
}

}  // namespace motley::MOTLEY_ISA
