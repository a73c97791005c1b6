// Value by value (softmax: row by row): a + b, a · b, factor · x, functions; and strided copies.
#include "functions.hpp"

namespace motley::MOTLEY_ISA {
namespace {

constexpr int64_t kChunk = 4096;  // values per task

int64_t shorter(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace

void binary(const BinaryArgs& a, const Worker& worker) {
    for (int64_t task; (task = worker.take()) * kChunk < a.n;) {
        const int64_t stop = shorter(a.n, (task + 1) * kChunk);
        for (int64_t i = task * kChunk; i < stop;) {
            // up to the end of b's run: b_inner values, or one value b_repeat times
            const int64_t at = i / a.b_repeat % a.b_inner;
            const int64_t run = a.b_repeat == 1 ? a.b_inner - at : a.b_repeat - i % a.b_repeat;
            const int64_t end = shorter(stop, i + run);
            const float* b = a.b + at - (a.b_repeat == 1 ? i : 0);
            if (a.b_repeat != 1)
                for (; i < end; i++) a.out[i] = a.is_product ? a.a[i] * *b : a.a[i] + *b;
            else if (a.is_product)
                for (; i < end; i++) a.out[i] = a.a[i] * b[i];
            else
                for (; i < end; i++) a.out[i] = a.a[i] + b[i];
        }
    }
}

void unary(const UnaryArgs& a, const Worker& worker) {
    for (int64_t task; (task = worker.take()) * kChunk < a.n;) {
        const int64_t stop = shorter(a.n, (task + 1) * kChunk);
        for (int64_t i = task * kChunk; i < stop; i += kLanes) {
            const int n = static_cast<int>(shorter(kLanes, stop - i));
            const f32v x = load_some(a.x + i, n);
            store_some(a.out + i, a.function == kNoFunction ? x * a.factor : apply(a.function, x), n);
        }
    }
}

void softmax(const SoftmaxArgs& a, const Worker& worker) {
    for (int64_t row; (row = worker.take()) < a.n_rows;) {
        const float* x = a.x + row * a.n_columns;
        float* out = a.out + row * a.n_columns;
        float most = -INFINITY, total = 0;
        for (int64_t i = 0; i < a.n_columns; i++) most = x[i] > most ? x[i] : most;
        for (int64_t i = 0; i < a.n_columns; i += kLanes) {
            const int n = static_cast<int>(shorter(kLanes, a.n_columns - i));
            const f32v e = vexp(load_some(x + i, n) - most);
            store_some(out + i, e, n);
            for (int j = 0; j < n; j++) total += e[j];
        }
        for (int64_t i = 0; i < a.n_columns; i++) out[i] /= total;
    }
}

void local_ids(const LocalIdsArgs& a, const Worker& worker) {
    for (int64_t i; (i = worker.take()) < a.n;) {
        int64_t n_before = 0;
        a.out[i] = -1;
        for (int r = 0; r < a.n_ranges; n_before += a.stop[r] - a.start[r], r++)
            if (a.ids[i] >= a.start[r] && a.ids[i] < a.stop[r]) a.out[i] = static_cast<int32_t>(a.ids[i] - a.start[r] + n_before);
    }
}

void copy(const CopyArgs& a, const Worker& worker) {
    const int64_t n_runs = a.shape[0] * a.shape[1] * a.shape[2];
    const int64_t step = a.shape[3] && a.shape[3] < kChunk ? kChunk / a.shape[3] : 1;
    for (int64_t task; (task = worker.take() * step) < n_runs;)
        for (int64_t run = task; run < shorter(n_runs, task + step); run++) {
            const int64_t i = run / (a.shape[1] * a.shape[2]), j = run / a.shape[2] % a.shape[1], k = run % a.shape[2];
            float* out = a.out + i * a.out_stride[0] + j * a.out_stride[1] + k * a.out_stride[2];
            if (!a.source) {
                for (int64_t l = 0; l < a.shape[3]; l++) out[l * a.out_stride[3]] = 0.0f;
                continue;
            }
            const float* in = a.source + i * a.source_stride[0] + j * a.source_stride[1] + k * a.source_stride[2];
            if (a.source_stride[3] == 1 && a.out_stride[3] == 1)
                std::memcpy(out, in, a.shape[3] * sizeof(float));
            else
                for (int64_t l = 0; l < a.shape[3]; l++) out[l * a.out_stride[3]] = in[l * a.source_stride[3]];
        }
}

}  // namespace motley::MOTLEY_ISA
