// Rows of 4-byte words → vectors with a row in each lane.
#pragma once
#include "simd.hpp"

namespace motley::MOTLEY_ISA {

// 16 rows of 4 words, in[i] being rows 4i … 4i + 3.
inline void transpose4(const u32x16 in[4], u32x16 out[4]) {
    u32x16 low[2], high[2];
    for (int i = 0; i < 2; i++) {
        const u32x16 a = in[2 * i], b = in[2 * i + 1];  // eight rows
        low[i] = __builtin_shufflevector(a, b, 0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
        high[i] = __builtin_shufflevector(a, b, 2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
    }
    out[0] = __builtin_shufflevector(low[0], low[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    out[1] = __builtin_shufflevector(low[0], low[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    out[2] = __builtin_shufflevector(high[0], high[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    out[3] = __builtin_shufflevector(high[0], high[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

// Exchanges the lanes of a that have bit S in their number with those of b that have not.
template <int S>
inline void exchange(u32x16& a, u32x16& b) {
    const u32x16 x = a, y = b;
    if constexpr (S == 1) {
        a = __builtin_shufflevector(x, y, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        b = __builtin_shufflevector(x, y, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    } else if constexpr (S == 2) {
        a = __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        b = __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    } else if constexpr (S == 4) {
        a = __builtin_shufflevector(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        b = __builtin_shufflevector(x, y, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    } else {
        a = __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        b = __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
}

template <int N, int S = 1>
inline void transpose_square(u32x16 v[N]) {
#pragma GCC unroll 16
    for (int i = 0; i < N; i++)
        if (!(i & S)) exchange<S>(v[i], v[i + S]);
    if constexpr (2 * S < N) transpose_square<N, 2 * S>(v);
}

// 16 rows of 8 words: two squares side by side.
inline void transpose8(const uint8_t* rows, u32x16 out[8]) {
    for (int i = 0; i < 8; i++) out[i] = load_pieces(rows + 32 * i, rows + 32 * (i + 8));
    transpose_square<8>(out);
}

// 16 rows of 16 words, `stride` bytes apart.
inline void transpose16(const uint8_t* rows, int stride, u32x16 out[16]) {
    for (int i = 0; i < 16; i++) out[i] = load<u32x16>(rows + stride * i);
    transpose_square<16>(out);
}

}  // namespace motley::MOTLEY_ISA
