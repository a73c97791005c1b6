// Panels: decoded columns of one group of rows, for matrix × matrix products and the conversion to float.
#pragma once
#include "with_format.hpp"

namespace motley::MOTLEY_ISA {

constexpr int64_t kPanelColumns = 512;
constexpr int64_t kPanelSteps = kPanelColumns / kStep;

// If kCutsFull, full codes are cut in two: code = 16 · high + low - 128, and `codes` has the low parts.
struct alignas(64) CodePanel {
    struct Step {
        uint8_t codes[8][kVectorBytes];
        float scale[2][kGroup], minimum[2][kGroup];
    } steps[kPanelSteps];
    uint8_t high[kCutsFull ? kPanelSteps : 1][8][kVectorBytes];
};

struct alignas(64) FloatPanel {
    float values[kPanelColumns][kGroup];
};

// Decodes columns first … first + n of a group; both are multiples of the format's block. `cuts`: full codes are cut.
template <class F>
inline void decode_codes(const uint8_t* group, int64_t first, int64_t n, bool cuts, CodePanel& panel) {
    const uint8_t* block = group + first / F::kColumns * F::kGroupBytes;
    const uint8_t offset = F::kIsFull && cuts ? 128 : 0;  // makes a signed code unsigned
    for (int64_t step = 0; step < n / kStep; block += F::kGroupBytes) {
#pragma GCC unroll 8
        for (int s = 0; s < F::kSteps; s++, step++) {
            u8v codes[8];
            Scales scales;
            F::codes(block, s, codes);
            F::scales(block, s, scales);
            CodePanel::Step& out = panel.steps[step];
            for (int j = 0; j < 8; j++) {
                const u8v code = codes[j] ^ splat(offset);
                store(out.codes[j], cuts ? code & splat(uint8_t{15}) : code);
                if (kCutsFull && cuts) store(panel.high[step][j], shift_right(code, 4) & splat(uint8_t{15}));
            }
            for (int h = 0; h < F::kHalves; h++) {
                store(out.scale[h], scales.scale[h]);
                store(out.minimum[h], scales.minimum[h] + scales.scale[h] * offset);
            }
        }
    }
}

// Changes a panel with one scale per step into one with two.
inline void repeat_halves(CodePanel& panel) {
    for (CodePanel::Step& step : panel.steps) {
        std::memcpy(step.scale[1], step.scale[0], sizeof step.scale[0]);
        std::memcpy(step.minimum[1], step.minimum[0], sizeof step.minimum[0]);
    }
}

// Code i of the four in each lane.
template <class F>
inline i32v code_of(u32v codes, int i) {
    if (F::kIsFull && kFullIsSigned) return as<i32v>(codes << (24 - 8 * i)) >> 24;
    return as<i32v>(byte_of(codes, i));
}

// Converts one step of a block to 32 columns of floats.
template <class F>
inline void step_to_float(const uint8_t* block, int s, float out[kStep][kGroup]) {
    u8v codes[8];
    Scales scales;
    F::codes(block, s, codes);
    F::scales(block, s, scales);
    for (int c = 0; c < kStep; c++) {
        const int h = F::kHalves == 2 ? c / 16 : 0;
        const f32v code = to_float(code_of<F>(as<u32v>(codes[c / 4]), c % 4));
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
