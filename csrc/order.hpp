// Floats as integers of the same order, in which NaN is above all numbers and -0 is 0.
#pragma once
#include <bit>
#include <cstdint>

namespace motley {

constexpr int64_t kPeakStretch = 128;  // values

// Arithmetic only: of conditions compilers make branches, and no vectors.
inline int32_t order_of(float x) {
    const int32_t bits = std::bit_cast<int32_t>(x), magnitude = bits & INT32_MAX, sign = bits >> 31;
    const int32_t is_nan = (0x7f800000 - magnitude) >> 31;  // -1 or 0
    return (((magnitude ^ sign) - sign) & ~is_nan) | (INT32_MAX & is_nan);
}

}  // namespace motley
