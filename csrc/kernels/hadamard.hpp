// The orthonormal Walsh–Hadamard transform of n = 2^k values in place: log n passes of sums and differences.
#pragma once
#include "simd.hpp"

namespace motley::MOTLEY_ISA {

inline void hadamard(float* x, int n) {
    for (int half = 1; half < n; half *= 2)
        for (int i = 0; i < n; i += 2 * half)
            for (int j = i; j < i + half; j++) {
                const float a = x[j], b = x[j + half];
                x[j] = a + b;
                x[j + half] = a - b;
            }
    const float factor = 1.0f / std::sqrt(static_cast<float>(n));
    for (int i = 0; i < n; i++) x[i] *= factor;
}

// Transforms each run of `size` values of x, which has n.
inline void hadamard_stretches(float* x, int64_t n, int size) {
    for (int64_t i = 0; i < n; i += size) hadamard(x + i, size);
}

}  // namespace motley::MOTLEY_ISA
