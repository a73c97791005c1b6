// The non-linear functions, on a vector.
#pragma once
#include "../kernels.hpp"
#include "simd.hpp"

namespace motley::MOTLEY_ISA {

inline f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + vexp(-x)); }
inline f32x16 vtanh(f32x16 x) { return 1.0f - 2.0f / (vexp(x * 2.0f) + 1.0f); }

inline f32x16 apply(int function, f32x16 x) {
    switch (function) {
        case kSilu: return x * sigmoid(x);
        case kGelu: {
            for (int i = 0; i < kLanes; i++) x[i] *= 0.5f * (1.0f + erff(x[i] * 0.70710678f));
            return x;
        }
        case kGeluTanh: return x * 0.5f * (1.0f + vtanh(0.79788456f * (x + 0.044715f * x * x * x)));
        case kRelu: return x < f32x16{} ? f32x16{} : x;
        case kSigmoid: return sigmoid(x);
        case kTanh: return vtanh(x);
    }
    return x;
}

}  // namespace motley::MOTLEY_ISA
