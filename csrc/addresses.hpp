// Addresses that Python passes, and their conversion to typed pointers.
#pragma once
#include <cstdint>

#include "kernels.hpp"

namespace motley {

using Address = uintptr_t;

template <class T = float>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// The parts of quantized rows, one after the other.
inline int64_t quantized_bytes(int64_t n_rows, int64_t n_columns) {
    return aligned(n_rows * n_columns) + 2 * aligned(n_rows * n_columns / 8) + 2 * aligned(n_rows * n_columns / 4);
}

inline Rows rows_at(Address values, int64_t stride, Address quantized, int64_t n_rows, int64_t n_columns) {
    Rows rows{at(values), stride, at<int8_t>(quantized), nullptr, nullptr, nullptr, nullptr};
    if (quantized) {
        const Address scales = quantized + aligned(n_rows * n_columns), steps = aligned(n_rows * n_columns / 8);
        rows.scales = at(scales);
        rows.sums = at(scales + steps);
        rows.half_sums = at(scales + 2 * steps);
        rows.code_sums = at<int32_t>(scales + 2 * steps + aligned(n_rows * n_columns / 4));
    }
    return rows;
}

}  // namespace motley
