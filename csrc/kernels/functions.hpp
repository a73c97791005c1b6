// The activation functions, on a vector.
#pragma once
#include "../kernels.hpp"
#include "simd.hpp"

namespace motley::MOTLEY_ISA {

inline f32v sigmoid(f32v x) { return 1.0f / (1.0f + vexp(-x)); }
inline f32v vtanh(f32v x) { return 1.0f - 2.0f / (vexp(x * 2.0f) + 1.0f); }

inline f32v apply(int function, f32v x) {
    switch (function) {
        case kSilu: return x * sigmoid(x);
        case kGelu: {
            for (int i = 0; i < kLanes; i++) x[i] *= 0.5f * (1.0f + erff(x[i] * 0.70710678f));
            return x;
        }
        case kGeluTanh: return x * 0.5f * (1.0f + vtanh(0.79788456f * (x + 0.044715f * x * x * x)));
        case kRelu: return x < f32v{} ? f32v{} : x;
        case kSigmoid: return sigmoid(x);
        case kTanh: return vtanh(x);
        case kSoftplus: {
            for (int i = 0; i < kLanes; i++) x[i] = (x[i] > 0 ? x[i] : 0.0f) + log1pf(expf(-std::fabs(x[i])));
            return x;
        }
    }
    return x;
}

// gate(first) · second; gpt-oss's gate is a function of both.
inline f32v gated(int function, f32v first, f32v second) {
    if (function != kClampedSwiglu) return apply(function, first) * second;
    const f32v limit = splat(7.0f);
    first = first > limit ? limit : first;
    second = second > limit ? limit : second;
    second = second < -limit ? -limit : second;
    return first * sigmoid(first * 1.702f) * (second + 1.0f);
}

}  // namespace motley::MOTLEY_ISA
