// From a format's number to its type: with_format(f, [](auto F) { using Format = decltype(F); … }).
#pragma once
#include "../kernels.hpp"
#include "formats.hpp"

namespace motley::MOTLEY_ISA {

template <class Visit>
inline void with_quantized(int format, Visit&& visit) {
    switch (format) {
        case kQ8_0: return visit(Q8_0{});
        case kQ4_0: return visit(Q4_0{});
        case kQ4_1: return visit(Q4_1{});
        case kQ5_0: return visit(Q5_0{});
        case kQ5_1: return visit(Q5_1{});
        case kQ2_K: return visit(Q2_K{});
        case kQ3_K: return visit(Q3_K{});
        case kQ4_K: return visit(Q4_K{});
        case kQ5_K: return visit(Q5_K{});
        case kQ6_K: return visit(Q6_K{});
        case kIQ4_NL: return visit(IQ4_NL{});
        case kIQ4_XS: return visit(IQ4_XS{});
        case kMXFP4: return visit(MXFP4{});
    }
}

template <class Visit>
inline void with_plain(int format, Visit&& visit) {
    switch (format) {
        case kF32: return visit(F32{});
        case kF16: return visit(F16{});
        case kBF16: return visit(BF16{});
    }
}

// Whether the format is in rows as in a file (rows.hpp), not in groups.
inline bool is_rows(int format) { return format == kQ8_0Rows; }

inline bool is_plain(int format) { return format == kF32 || format == kF16 || format == kBF16; }

// Bytes of a repacked group of rows.
inline int64_t group_bytes(int format, int64_t n_columns) {
    int64_t bytes = 0;
    if (is_rows(format)) format = kQ8_0;  // the same number of bytes
    if (is_plain(format)) return n_columns * (format == kF32 ? 4 : 2) * kGroup;
    with_quantized(format, [&](auto f) { bytes = n_columns / f.kColumns * f.kGroupBytes; });
    return bytes;
}

}  // namespace motley::MOTLEY_ISA
