// A stretch of columns of one group of rows, decoded: what the matrix × matrix product and the ways back to float read.
#pragma once
#include "with_format.hpp"

namespace motley::MOTLEY_ISA {

constexpr int64_t kPanelColumns = 512;
constexpr int64_t kPanelSteps = kPanelColumns / kStep;

struct alignas(64) CodePanel {
    uint8_t codes[kPanelSteps][8][64];
    float scale[kPanelSteps][2][kGroup], minimum[kPanelSteps][2][kGroup];
};

struct alignas(64) FloatPanel {
    float values[kPanelColumns][kGroup];
};

// Columns first … first + n of a group; both are multiples of the format's block.
template <class F>
inline void decode_codes(const uint8_t* group, int64_t first, int64_t n, CodePanel& panel) {
    const uint8_t* block = group + first / F::kColumns * F::kGroupBytes;
    for (int64_t step = 0; step < n / kStep; block += F::kGroupBytes) {
#pragma GCC unroll 8
        for (int s = 0; s < F::kSteps; s++, step++) {
            u8x64 codes[8];
            Scales scales;
            F::codes(block, s, codes);
            F::scales(block, s, scales);
            for (int j = 0; j < 8; j++) store(panel.codes[step][j], codes[j]);
            for (int h = 0; h < F::kHalves; h++) {
                store(panel.scale[step][h], scales.scale[h]);
                store(panel.minimum[step][h], scales.minimum[h]);
            }
        }
    }
}

// A panel with one scale a step, as one with two.
inline void repeat_halves(CodePanel& panel) {
    for (int64_t s = 0; s < kPanelSteps; s++) {
        std::memcpy(panel.scale[s][1], panel.scale[s][0], sizeof panel.scale[s][0]);
        std::memcpy(panel.minimum[s][1], panel.minimum[s][0], sizeof panel.minimum[s][0]);
    }
}

// One step of a block as 32 columns of floats.
template <class F>
inline void step_to_float(const uint8_t* block, int s, float out[kStep][kGroup]) {
    u8x64 codes[8];
    Scales scales;
    F::codes(block, s, codes);
    F::scales(block, s, scales);
    for (int c = 0; c < kStep; c++) {
        const int h = F::kHalves == 2 ? c / 16 : 0;
        const f32x16 code = to_float(byte_of(reinterpret_cast<u32x16>(codes[c / 4]), c % 4));
        store(out[c], code * scales.scale[h] - scales.minimum[h]);
    }
}

inline void decode_floats(int format, const uint8_t* group, int64_t first, int64_t n, FloatPanel& panel) {
    if (is_plain(format)) {
        with_plain(format, [&](auto f) {
            const uint8_t* words = group + first / f.kColumnsPerWord * kWordBytes;
            for (int64_t c = 0; c < n; c++) store(panel.values[c], f.column(words, c));
        });
        return;
    }
    with_quantized(format, [&](auto f) {
        using F = decltype(f);
        const uint8_t* block = group + first / F::kColumns * F::kGroupBytes;
        for (int64_t c = 0; c < n; block += F::kGroupBytes)
            for (int s = 0; s < F::kSteps; s++, c += kStep) step_to_float<F>(block, s, panel.values + c);
    });
}

}  // namespace motley::MOTLEY_ISA
