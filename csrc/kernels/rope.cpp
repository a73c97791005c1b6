// RoPE. A pair (a, b) of dims is rotated by the angle position · frequency:
//
//     a' = a·cos - b·sin      b' = a·sin + b·cos
//
// Pairs are neighbours (interleaved), or dims i and i + n_pairs. The cosines of a batch are the same in all heads and
// layers, so they are read from a table. A Hadamard transform of the rotated head may follow.
#include "../kernels.hpp"
#include "hadamard.hpp"

namespace motley::MOTLEY_ISA {

namespace {

void rotate_pair(float u, float v, const float* table, float& first, float& second) {
    first = u * table[0] - v * table[1];
    second = u * table[1] + v * table[0];
}

// `out` may be x.
void rotate_neighbours(const float* x, const float* table, int64_t n_pairs, float* out) {
    f32v signs;
    for (int i = 0; i < kLanes; i++) signs[i] = i % 2 ? 1.0f : -1.0f;
    int64_t p = 0;
    for (; 2 * p + kLanes <= 2 * n_pairs; p += kLanes / 2) {
        const f32v own = load<f32v>(x + 2 * p), angles = load<f32v>(table + 2 * p);
        store(out + 2 * p, own * double_firsts(angles) + swap_pairs(own) * (double_seconds(angles) * signs));
    }
    for (; p < n_pairs; p++) rotate_pair(x[2 * p], x[2 * p + 1], table + 2 * p, out[2 * p], out[2 * p + 1]);
}

void rotate_halves(const float* x, const float* table, int64_t n_pairs, float* out) {
    int64_t p = 0;
    for (; p + kLanes <= n_pairs; p += kLanes) {
        const f32v u = load<f32v>(x + p), v = load<f32v>(x + p + n_pairs);
        const f32v low = load<f32v>(table + 2 * p), high = load<f32v>(table + 2 * p + kLanes);
        const f32v cosine = firsts(low, high), sine = seconds(low, high);
        store(out + p, u * cosine - v * sine);
        store(out + p + n_pairs, u * sine + v * cosine);
    }
    for (; p < n_pairs; p++) rotate_pair(x[p], x[p + n_pairs], table + 2 * p, out[p], out[p + n_pairs]);
}

}  // namespace

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
            if (a.is_interleaved)
                rotate_neighbours(x, table, a.n_pairs, out);
            else
                rotate_halves(x, table, a.n_pairs, out);
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
