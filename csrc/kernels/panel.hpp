// Panels: decoded columns of one group of rows, for matrix × matrix products and the conversion to float.
#pragma once
#include "with_format.hpp"

namespace motley::MOTLEY_ISA {

constexpr int64_t kPanelColumns = 512;
constexpr int64_t kPanelSteps = kPanelColumns / kStep;

// A product of floats visits kPlainVisit columns at a time. Each visit has kSums sums, of every kSums-th column; the first
// one takes the columns at the end that are less than kSums, too.
constexpr int kSums = 4;
constexpr int64_t kPlainVisit = 256;
static_assert(kPanelColumns % kPlainVisit == 0);

constexpr int kCutOffset = 128;

// If kCutsFull, full codes are cut in two: code = 16 · high + low - offset, and `codes` has the low parts.
struct alignas(64) CodePanel {
    int32_t offset;  // kCutOffset if signed codes were cut, otherwise 0
    struct Step {
        uint8_t codes[8][kVectorBytes];
        float scale[2][kGroup], minimum[2][kGroup];
    } steps[kPanelSteps];
    uint8_t high[kCutsFull ? kPanelSteps : 1][8][kVectorBytes];
};

// The columns of each visit are in the order of its sums: the first sum's columns, the second's, …, the columns at the end.
struct alignas(64) FloatPanel {
    float values[kPanelColumns][kGroup];

    // Column c of a panel with n columns.
    float* column(int64_t c, int64_t n) {
        const int64_t begin = c / kPlainVisit * kPlainVisit, i = c - begin;
        const int64_t share = (n - begin < kPlainVisit ? n - begin : kPlainVisit) / kSums;
        return values[i < kSums * share ? begin + i % kSums * share + i / kSums : c];
    }
};

// Decodes columns first … first + n of a group; both are multiples of the format's block. `cuts`: full codes are cut.
template <class F>
inline void decode_codes(const uint8_t* group, int64_t first, int64_t n, bool cuts, CodePanel& panel) {
    const uint8_t* block = group + first / F::kColumns * F::kGroupBytes;
    const uint8_t offset = F::kIsFull && cuts ? kCutOffset : 0;  // makes a signed code unsigned
    panel.offset = offset;
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
                store(out.minimum[h], scales.minimum[h]);
            }
        }
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
            for (int64_t c = 0; c < n; c++) store(panel.column(c, n), f.column(words, c));
        });
        return;
    }
    with_quantized(format, [&](auto f) {
        using F = decltype(f);
        const uint8_t* block = group + first / F::kColumns * F::kGroupBytes;
        for (int64_t c = 0; c < n; block += F::kGroupBytes)
            for (int s = 0; s < F::kSteps; s++, c += kStep) {
                alignas(64) float columns[kStep][kGroup];
                step_to_float<F>(block, s, columns);
                for (int i = 0; i < kStep; i++) std::memcpy(panel.column(c + i, n), columns[i], sizeof columns[i]);
            }
    });
}

}  // namespace motley::MOTLEY_ISA
