// Rows of 4-byte words → vectors with a row in each lane.
#pragma once
#include "simd.hpp"

namespace motley::MOTLEY_ISA {

using u64v = uint64_t __attribute__((vector_size(kVectorBytes)));
using Lanes = std::make_integer_sequence<int, kLanes>;
using Pairs = std::make_integer_sequence<int, kLanes / 2>;

// Within each quarter (128 bits, where shuffles are fastest): words 0 and 1, or with High 2 and 3, of x and y in turn.
template <bool High, int... Lane>
[[gnu::always_inline]] inline u32v mix_words(u32v x, u32v y, std::integer_sequence<int, Lane...>) {
    return __builtin_shufflevector(x, y, (Lane / 4 * 4 + 2 * High + Lane % 4 / 2 + Lane % 2 * kLanes)...);
}

// The same with pairs of words: the first, or with High the second pair of x, then that of y.
template <bool High, int... Pair>
[[gnu::always_inline]] inline u32v mix_pairs(u32v x, u32v y, std::integer_sequence<int, Pair...>) {
    return as<u32v>(__builtin_shufflevector(as<u64v>(x), as<u64v>(y), (Pair / 2 * 2 + High + Pair % 2 * kLanes / 2)...));
}

// The even quarters, or with Odd the odd ones, of x, then those of y.
template <bool Odd, int... Lane>
[[gnu::always_inline]] inline u32v join_quarters(u32v x, u32v y, std::integer_sequence<int, Lane...>) {
    constexpr int kHalf = kLanes / 2;
    return __builtin_shufflevector(x, y, (Lane % kHalf / 4 * 8 + 4 * Odd + Lane % 4 + Lane / kHalf * kLanes)...);
}

// Squares of 4 × 4 words, side by side in 4 vectors.
[[gnu::always_inline]] inline void transpose_fours(u32v v[4]) {
    const u32v low[2] = {mix_words<false>(v[0], v[1], Lanes{}), mix_words<false>(v[2], v[3], Lanes{})};
    const u32v high[2] = {mix_words<true>(v[0], v[1], Lanes{}), mix_words<true>(v[2], v[3], Lanes{})};
    v[0] = mix_pairs<false>(low[0], low[1], Pairs{});
    v[1] = mix_pairs<true>(low[0], low[1], Pairs{});
    v[2] = mix_pairs<false>(high[0], high[1], Pairs{});
    v[3] = mix_pairs<true>(high[0], high[1], Pairs{});
}

// Exchanges the lanes of a that have bit S in their number with those of b that have not.
template <int S, int... Lane>
inline void exchange_lanes(u32v& a, u32v& b, std::integer_sequence<int, Lane...>) {
    const u32v x = a, y = b;
    a = __builtin_shufflevector(x, y, (Lane & S ? kLanes + Lane - S : Lane)...);
    b = __builtin_shufflevector(x, y, (Lane & S ? kLanes + Lane : Lane + S)...);
}

// Squares of N × N words, side by side in N vectors.
template <int N>
inline void transpose_squares(u32v v[N]) {
    static_assert(N == 4 || N == 8 || N == 16);
#pragma GCC unroll 4
    for (int i = 0; i < N; i += 4) transpose_fours(v + i);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        if constexpr (N == 8) exchange_lanes<4>(v[i], v[i + 4], Lanes{});
        if constexpr (N == 16) {  // the four quarters of four vectors
            u32v joined[2][2];
            for (int j = 0; j < 2; j++) {
                joined[0][j] = join_quarters<false>(v[i + 8 * j], v[i + 8 * j + 4], Lanes{});
                joined[1][j] = join_quarters<true>(v[i + 8 * j], v[i + 8 * j + 4], Lanes{});
            }
            for (int j = 0; j < 2; j++) {
                v[i + 4 * j] = join_quarters<false>(joined[j][0], joined[j][1], Lanes{});
                v[i + 4 * j + 8] = join_quarters<true>(joined[j][0], joined[j][1], Lanes{});
            }
        }
    }
}

// The sums of the words of each of N rows: of whole vectors, or with 16 lanes of half ones: lane place_of_half(i) is the sum of
// half i, where vector k has halves 2k and 2k + 1.
template <int N>
[[gnu::always_inline]] inline u32v sum_rows(const u32v v[N]) {
    static_assert(N == (kLanes < 8 ? 4 : 8));
    u32v fours[N / 4];  // the sums of each quarter of four vectors
#pragma GCC unroll 2
    for (int i = 0; i < N / 4; i++) {
        const u32v* const w = v + 4 * i;
        const u32v a = mix_words<false>(w[0], w[1], Lanes{}) + mix_words<true>(w[0], w[1], Lanes{});
        const u32v b = mix_words<false>(w[2], w[3], Lanes{}) + mix_words<true>(w[2], w[3], Lanes{});
        fours[i] = mix_pairs<false>(a, b, Pairs{}) + mix_pairs<true>(a, b, Pairs{});
    }
    if constexpr (N == 4)
        return fours[0];
    else
        return join_quarters<false>(fours[0], fours[1], Lanes{}) + join_quarters<true>(fours[0], fours[1], Lanes{});
}
constexpr int place_of_half(int i) { return i / 8 * 8 + i % 2 * 4 + i % 8 / 2; }

// A vector from pieces of 16 or 32 bytes: piece k begins at piece(k). (Through memory, the load would wait for stores.)
template <int Bytes, class Piece>
inline u32v load_pieces(Piece&& piece) {
#if MOTLEY_VECTOR_BYTES == 64
    if constexpr (Bytes == 16) {
        const auto at = [&](int k) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(piece(k))); };
        __m512i v = _mm512_inserti32x4(_mm512_castsi128_si512(at(0)), at(1), 1);
        v = _mm512_inserti32x4(v, at(2), 2);
        return as<u32v>(_mm512_inserti32x4(v, at(3), 3));
    } else {
        const auto at = [&](int k) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(piece(k))); };
        return as<u32v>(_mm512_inserti64x4(_mm512_castsi256_si512(at(0)), at(1), 1));
    }
#elif MOTLEY_VECTOR_BYTES == 32
    const auto at = [&](int k) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(piece(k))); };
    return as<u32v>(_mm256_inserti128_si256(_mm256_castsi128_si256(at(0)), at(1), 1));
#else
    return load<u32v>(piece(0));
#endif
}

// N words of kLanes rows, each beginning at row(r): out[w] becomes word w of all rows.
template <int N, class Row>
inline void transpose_words(Row&& row, u32v out[N]) {
    if constexpr (N >= kLanes) {
        for (int first = 0; first < N; first += kLanes) {
            for (int i = 0; i < kLanes; i++) out[first + i] = load<u32v>(row(i) + 4 * first);
            transpose_squares<kLanes>(out + first);
        }
    } else {
        for (int i = 0; i < N; i++) out[i] = load_pieces<4 * N>([&](int k) { return row(i + N * k); });
        transpose_squares<N>(out);
    }
}

// The same for 4 words of rows that are contiguous.
inline void transpose_dense4(const uint8_t* rows, u32v out[4]) {
#if MOTLEY_VECTOR_BYTES == 64
    u32v low[2], high[2];
    for (int i = 0; i < 2; i++) {
        const u32v a = load<u32v>(rows + 128 * i), b = load<u32v>(rows + 128 * i + 64);  // eight rows
        low[i] = __builtin_shufflevector(a, b, 0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
        high[i] = __builtin_shufflevector(a, b, 2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
    }
    out[0] = __builtin_shufflevector(low[0], low[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    out[1] = __builtin_shufflevector(low[0], low[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    out[2] = __builtin_shufflevector(high[0], high[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    out[3] = __builtin_shufflevector(high[0], high[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#else
    transpose_words<4>([&](int r) { return rows + 16 * r; }, out);
#endif
}

// Numbers of 16 bits from the low or the high half of each 128-bit lane of a and b, in turn.
template <bool IsHigh, int... Place>
inline u16v interleave_halves(u16v a, u16v b, std::integer_sequence<int, Place...>) {
    return __builtin_shufflevector(a, b, (Place % 2 * (kVectorBytes / 2) + Place / 8 * 8 + IsHigh * 4 + Place % 8 / 2)...);
}

// Squares of 8 × 8 numbers of 16 bits, one in each 128-bit lane of 8 vectors: each round moves the highest bit of a number's
// vector to the lowest of its place, and the highest of its place to the lowest of its vector.
inline void transpose_half_squares(u16v (&v)[8]) {
    constexpr auto places = std::make_integer_sequence<int, kVectorBytes / 2>{};
#pragma GCC unroll 3
    for (int round = 0; round < 3; round++) {
        u16v next[8];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            next[2 * i] = interleave_halves<false>(v[i], v[i + 4], places);
            next[2 * i + 1] = interleave_halves<true>(v[i], v[i + 4], places);
        }
        std::memcpy(v, next, sizeof v);
    }
}

// kLanes rows of 32 numbers of 16 bits, each beginning at row(r): calls visit(column, that number of all rows).
template <class Row, class Visit>
inline void transpose_halves(Row&& row, Visit&& visit) {
#if MOTLEY_VECTOR_BYTES == 64
    u16v v[2][8];
    for (int half = 0; half < 2; half++) {
        for (int r = 0; r < 8; r++) v[half][r] = load<u16v>(row(8 * half + r));
        transpose_half_squares(v[half]);
    }
    using Pairs = uint64_t __attribute__((vector_size(64)));
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const Pairs a = as<Pairs>(v[0][i]), b = as<Pairs>(v[1][i]);
        const Pairs low = __builtin_shufflevector(a, b, 0, 1, 8, 9, 2, 3, 10, 11), high = __builtin_shufflevector(a, b, 4, 5, 12, 13, 6, 7, 14, 15);
        visit(i, as<u16l>(__builtin_shufflevector(low, low, 0, 1, 2, 3)));
        visit(8 + i, as<u16l>(__builtin_shufflevector(low, low, 4, 5, 6, 7)));
        visit(16 + i, as<u16l>(__builtin_shufflevector(high, high, 0, 1, 2, 3)));
        visit(24 + i, as<u16l>(__builtin_shufflevector(high, high, 4, 5, 6, 7)));
    }
#elif MOTLEY_VECTOR_BYTES == 32
    for (int half = 0; half < 2; half++) {
        u16v v[8];
        for (int r = 0; r < 8; r++) v[r] = load<u16v>(row(r) + 32 * half);
        transpose_half_squares(v);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            visit(16 * half + i, __builtin_shufflevector(v[i], v[i], 0, 1, 2, 3, 4, 5, 6, 7));
            visit(16 * half + 8 + i, __builtin_shufflevector(v[i], v[i], 8, 9, 10, 11, 12, 13, 14, 15));
        }
    }
#else
    u32v words[16];
    transpose_words<16>(row, words);
    for (int w = 0; w < 16; w++) {
        visit(2 * w, narrow(words[w] & 0xffff));
        visit(2 * w + 1, narrow(words[w] >> 16));
    }
#endif
}

}  // namespace motley::MOTLEY_ISA
