// out = x / sqrt(mean(x²) + eps) · weight for each row, as floats, as int8 (quantize.hpp), or both; and int8 alone.
#include "quantize.hpp"

namespace motley::MOTLEY_ISA {
namespace {

// Values that are normalized and then quantized at a time: they fit into the scratch memory for any row length.
constexpr int64_t kNormChunk = 4096;
static_assert(kNormChunk * sizeof(float) <= kScratchBytes && kNormChunk % 32 == 0);

}  // namespace

void quantize(const QuantizeArgs& a, const Worker& worker) {
    for (int64_t row; (row = worker.take()) < a.n_rows;) quantize_row(a.x.values + row * a.x.stride, a.x, row, a.n_columns);
}

void norm(const NormArgs& a, const Worker& worker) {
    const int64_t n = a.n_columns, whole = n / kLanes * kLanes;
    for (int64_t row; (row = worker.take()) < a.n_rows;) {
        const float* x = a.x + row * n;
        f32v squares = {};
        for (int64_t i = 0; i < whole; i += kLanes) {
            const f32v v = load<f32v>(x + i);
            squares += v * v;
        }
        float total = sum_lanes(squares);
        for (int64_t i = whole; i < n; i++) total += x[i] * x[i];
        const float factor = 1.0f / std::sqrt(total / static_cast<float>(n) + a.eps);
        for (int64_t first = 0; first < n; first += kNormChunk) {
            const int64_t stop = n - first < kNormChunk ? n : first + kNormChunk;
            float* out = a.out ? a.out + row * n + first : reinterpret_cast<float*>(worker.scratch);
            for (int64_t i = first; i < stop; i++) out[i - first] = a.weight ? x[i] * factor * a.weight[i] : x[i] * factor;
            if (a.quantized.codes) quantize_stretch(out, a.quantized, row, n, first, stop - first);
        }
    }
}

}  // namespace motley::MOTLEY_ISA
