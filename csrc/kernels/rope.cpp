// RoPE. A pair (a, b) of dims is rotated by the angle position · frequency:
//
//     a' = a·cos - b·sin      b' = a·sin + b·cos
//
// Pairs are neighbours (interleaved), or dims i and i + n_pairs. The cosines of a batch are the same in all heads and
// layers, so they are read from a table. A Hadamard transform of the rotated head may follow.
#include "../kernels.hpp"
#include "hadamard.hpp"

namespace motley::MOTLEY_ISA {

void rope_table(const RopeTableArgs& a, const Worker& worker) {
    for (int64_t t; (t = worker.take()) < a.n_tokens;)
        for (int64_t p = 0; p < a.n_pairs; p++) {
            const float angle = static_cast<float>(a.positions[t]) * a.frequencies[p];
            float* out = a.table + 2 * (t * a.n_pairs + p);
            out[0] = cosf(angle) * a.magnitude;
            out[1] = sinf(angle) * a.magnitude;
        }
}

void rope(const RopeArgs& a, const Worker& worker) {
    for (int64_t t; (t = worker.take()) < a.n_tokens;) {
        const float* table = a.table + 2 * t * a.n_pairs;
        for (int64_t h = 0; h < a.n_heads; h++) {
            const int64_t at = (t * a.n_heads + h) * a.dim;
            const float* x = a.x + at;
            float* out = a.out + at;
            for (int64_t p = 0; p < a.n_pairs; p++) {
                const int64_t first = a.is_interleaved ? 2 * p : p, second = a.is_interleaved ? 2 * p + 1 : p + a.n_pairs;
                const float cosine = table[2 * p], sine = table[2 * p + 1], u = x[first], v = x[second];
                out[first] = u * cosine - v * sine;
                out[second] = u * sine + v * cosine;
            }
            for (int64_t i = 2 * a.n_pairs; i < a.dim; i++) out[i] = x[i];
            if (a.rotation) hadamard_stretches(out, a.dim, a.rotation);
        }
    }
}

void hadamard_rows(const HadamardArgs& a, const Worker& worker) {
    for (int64_t row; (row = worker.take()) < a.n_rows;) {
        float* out = a.out + row * a.size;
        if (out != a.x + row * a.size) std::memcpy(out, a.x + row * a.size, a.size * sizeof(float));
        hadamard(out, a.size);
    }
}

}  // namespace motley::MOTLEY_ISA
