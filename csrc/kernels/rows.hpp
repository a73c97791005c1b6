// Q8_0 matrices in the file's layout, so that a mapped file needs no copy: rows of blocks, each a float16 scale and 32
// codes (int8). The number of rows is a multiple of kGroup.
//
// Each step of a group of rows is transposed in registers, which gives the same codes as a repacked group (formats.hpp), and
// the same bits. That needs more instructions, and is as fast where memory bandwidth is the limit.
#pragma once
#include "few.hpp"
#include "panel.hpp"
#include "transpose.hpp"

namespace motley::MOTLEY_ISA {

constexpr int kRowBlockBytes = Q8_0::kBytes;

inline float row_scale(const uint8_t* block) {
    uint16_t half;
    std::memcpy(&half, block, 2);
    return half_to_float(half);
}

// One step of a group's rows, decoded as Q8_0 decodes a repacked group.
inline void read_row_step(const uint8_t* block, int64_t row_bytes, u8v (&codes)[8], f32v& scale) {
    u32v words[8];
    transpose_words<8>([&](int r) { return block + r * row_bytes + 2; }, words);
    for (int j = 0; j < 8; j++) codes[j] = as<u8v>(words[j]) ^ splat(kFullOffset);
    u16l halves;
    for (int r = 0; r < kGroup; r++) {
        uint16_t half;
        std::memcpy(&half, block + r * row_bytes, 2);
        halves[r] = half;
    }
    scale = halves_to_float(halves);
}

// The results of n groups of rows, which begin at `rows`; y is (group, token).
template <int Tokens>
inline void matvec_rows(const uint8_t* rows, int64_t row_bytes, int n, const FewRows& x, int64_t n_columns, f32v* y) {
    for (int i = 0; i < n; i++) {
        const uint8_t* block = rows + i * kGroup * row_bytes;
        f32v acc[Tokens] = {};
        // Rows of a group are read side by side. That is no pattern for the hardware, so the next group is prefetched in the
        // order of addresses.
        const uint8_t* ahead = block + kGroup * row_bytes;
        for (int64_t step = 0; step < n_columns / kStep; step++, block += kRowBlockBytes, ahead += kGroup * kRowBlockBytes) {
            fetch<2>(ahead, kGroup * kRowBlockBytes);
            u8v codes[8];
            Scales w;
            read_row_step(block, row_bytes, codes, w.scale[0]);
            w.minimum[0] = w.scale[0] * kFullOffset;
            dot_step(codes, w, FewSteps<Q8_0, Tokens>(x, step), 0, acc);
        }
        for (int t = 0; t < Tokens; t++) y[i * Tokens + t] = acc[t];
    }
}

// Decodes columns first … first + n of a group of rows into a panel, as for all other formats.
inline void decode_row_codes(const uint8_t* group, int64_t row_bytes, int64_t first, int64_t n, CodePanel& panel) {
    constexpr uint8_t kOffset = kCutsFull ? kCutOffset : kFullOffset;  // cut codes are unsigned
    panel.offset = kOffset ^ kFullOffset;
    const uint8_t* block = group + first / kStep * kRowBlockBytes;
    for (int64_t step = 0; step < n / kStep; step++, block += kRowBlockBytes) {
        u8v codes[8];
        f32v scale;
        read_row_step(block, row_bytes, codes, scale);
        CodePanel::Step& out = panel.steps[step];
        for (int j = 0; j < 8; j++) {
            const u8v code = codes[j] ^ splat(static_cast<uint8_t>(kOffset ^ kFullOffset));
            store(out.codes[j], kCutsFull ? code & splat(uint8_t{15}) : code);
            if (kCutsFull) store(panel.high[step][j], shift_right(code, 4) & splat(uint8_t{15}));
        }
        store(out.scale[0], scale);
        store(out.minimum[0], scale * kFullOffset);
    }
}

inline void decode_row_floats(const uint8_t* group, int64_t row_bytes, int64_t first, int64_t n, FloatPanel& panel) {
    for (int r = 0; r < kGroup; r++) {
        const uint8_t* block = group + r * row_bytes + first / kStep * kRowBlockBytes;
        for (int64_t c = 0; c < n; c += kStep, block += kRowBlockBytes) {
            const float scale = row_scale(block);
            for (int i = 0; i < kStep; i++) panel.column(c + i, n)[r] = scale * static_cast<int8_t>(block[2 + i]);
        }
    }
}

}  // namespace motley::MOTLEY_ISA
