// The largest value of every stretch of a row: where a sampler looks for the largest values of the row.
#include "../order.hpp"

namespace motley::MOTLEY_ISA {

void peaks(const float* row, int64_t n, int32_t* out) {
    const int64_t n_whole = n / kPeakStretch;
    for (int64_t i = 0; i < n_whole; i++) {
        const float* x = row + i * kPeakStretch;
        int32_t most = INT32_MIN;
        for (int64_t j = 0; j < kPeakStretch; j++) {  // without a branch, so that compilers use vectors
            const int32_t order = order_of(x[j]);
            most = order > most ? order : most;
        }
        out[i] = most;
    }
    if (n % kPeakStretch == 0) return;
    int32_t most = INT32_MIN;
    for (int64_t j = n_whole * kPeakStretch; j < n; j++) most = order_of(row[j]) > most ? order_of(row[j]) : most;
    out[n_whole] = most;
}

}  // namespace motley::MOTLEY_ISA
