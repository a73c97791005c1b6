// Python's names of formats, functions and cache types. The numbers are the enums' (kernels.hpp).
#pragma once
#include <string>
#include <vector>

#include "kernels.hpp"

namespace motley {

struct Named {
    std::string name;
    int number;
};

inline const std::vector<Named> kFormatNames = {
    {"F32", kF32},   {"F16", kF16},   {"BF16", kBF16}, {"Q8_0", kQ8_0},     {"Q4_0", kQ4_0},
    {"Q4_1", kQ4_1}, {"Q5_0", kQ5_0}, {"Q5_1", kQ5_1}, {"Q2_K", kQ2_K},     {"Q3_K", kQ3_K},
    {"Q4_K", kQ4_K}, {"Q5_K", kQ5_K}, {"Q6_K", kQ6_K}, {"IQ4_NL", kIQ4_NL}, {"IQ4_XS", kIQ4_XS},
    {"MXFP4", kMXFP4},
};

// Formats that kernels can also read in the file's layout.
inline const std::vector<Named> kRowFormatNames = {{"Q8_0", kQ8_0Rows}};

inline const std::vector<Named> kFunctionNames = {
    {"", kNoFunction}, {"silu", kSilu}, {"gelu", kGelu},       {"gelu_tanh", kGeluTanh},
    {"relu", kRelu},   {"tanh", kTanh}, {"sigmoid", kSigmoid}, {"clamped_swiglu", kClampedSwiglu},
    {"softplus", kSoftplus},
};

inline const std::vector<Named> kCacheTypeNames = {
    {"f32", kCacheF32},   {"f16", kCacheF16},   {"bf16", kCacheBF16}, {"q8_0", kCacheQ8_0},     {"q5_1", kCacheQ5_1},
    {"q5_0", kCacheQ5_0}, {"q4_1", kCacheQ4_1}, {"q4_0", kCacheQ4_0}, {"iq4_nl", kCacheIQ4_NL},
};

}  // namespace motley
