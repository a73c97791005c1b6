// out = x / sqrt(mean(x²) + eps) · weight for each row, as floats, as int8 (quantize.hpp), or both; and int8 alone.
#include "quantize.hpp"

namespace motley::MOTLEY_ISA {

void quantize(const QuantizeArgs& a, const Worker& worker) {
    for (int64_t row; (row = worker.take()) < a.n_rows;) quantize_row(a.x.values + row * a.x.stride, a.x, row, a.n_columns);
}

void norm(const NormArgs& a, const Worker& worker) {
    const int64_t n = a.n_columns, whole = n / kLanes * kLanes;
    for (int64_t row; (row = worker.take()) < a.n_rows;) {
        const float* x = a.x + row * n;
        float* out = a.out ? a.out + row * n : reinterpret_cast<float*>(worker.scratch);
        f32x16 squares = {};
        for (int64_t i = 0; i < whole; i += kLanes) {
            const f32x16 v = load<f32x16>(x + i);
            squares += v * v;
        }
        float total = sum_lanes(squares);
        for (int64_t i = whole; i < n; i++) total += x[i] * x[i];
        const float factor = 1.0f / std::sqrt(total / static_cast<float>(n) + a.eps);
        for (int64_t i = 0; i < n; i++) out[i] = a.weight ? x[i] * factor * a.weight[i] : x[i] * factor;
        if (a.quantized.codes) quantize_row(out, a.quantized, row, n);
    }
}

}  // namespace motley::MOTLEY_ISA
