// Final operations on a product before it is stored: + bias, + residual, or gate(first) · second.
#pragma once
#include "functions.hpp"
#include "formats.hpp"

namespace motley::MOTLEY_ISA {

// `y`: one token's results for the rows of group `g`.
inline void finish(const MatMulPart& part, int64_t token, int64_t g, f32v y) {
    const int64_t row = g * kGroup, left = part.n_rows - row;
    const int n = left < kGroup ? static_cast<int>(left) : kGroup;
    const int64_t at = token * part.out_stride + row;
    if (n == kGroup) {
        if (part.bias) y += load<f32v>(part.bias + row);
        if (part.residual) y += load<f32v>(part.residual + at);
        store(part.out + at, y);
    } else {
        if (part.bias) y += load_some(part.bias + row, n);
        if (part.residual) y += load_some(part.residual + at, n);
        store_some(part.out + at, y, n);
    }
}

inline f32v with_bias(const MatMulPart& part, int64_t g, f32v y) {
    if (!part.bias) return y;
    const int64_t left = part.n_rows - g * kGroup;
    return y + load_some(part.bias + g * kGroup, left < kGroup ? static_cast<int>(left) : kGroup);
}

// gate(first) · second, stored at the first part's output.
inline void finish_gated(const MatMulPart& gate, const MatMulPart& other, int function, int64_t token, int64_t g,
                         f32v first, f32v second) {
    const f32v y = gated(function, with_bias(gate, g, first), with_bias(other, g, second));
    const int64_t left = gate.n_rows - g * kGroup;
    store_some(gate.out + token * gate.out_stride + g * kGroup, y, left < kGroup ? static_cast<int>(left) : kGroup);
}

}  // namespace motley::MOTLEY_ISA
