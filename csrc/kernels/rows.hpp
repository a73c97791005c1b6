// Q8_0 matrices in the file's layout, so that a mapped file needs no copy: rows of blocks, each a float16 scale and 32
// codes (int8). The number of rows is a multiple of kGroup. The results have the same bits as a repacked group's (formats.hpp).
//
//   one token        reads row after row, in the order of addresses: several rows side by side are no pattern for the
//                    processor's own prefetching. Sums of codes are whole numbers and may be made in any order; only their
//                    products with scales are transposed and added step by step, as everywhere.
//   several tokens   transpose each step of a group in registers, and decode it once for all tokens.
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

// Steps of a row that are read at a time, and the place of each of kLanes steps in a vector.
constexpr int64_t kRunSteps = 256;
constexpr int kRunTiles = kRunSteps / kLanes;
constexpr int place_of_step(int step) { return kLanes == 16 ? step % 2 * 8 + step / 2 : step; }
constexpr int step_at_place(int place) { return kLanes == 16 ? place % 8 * 2 + place / 8 : place; }

// The scales of a row's next kLanes steps, by place. Joined as whole numbers: inserting them into a vector takes longer.
[[gnu::always_inline]] inline f32v scales_of_row(const uint8_t* blocks) {
    using Fours = uint64_t __attribute__((vector_size(kVectorBytes / 2)));
    Fours fours{};
#pragma GCC unroll 4
    for (int i = 0; i < kLanes / 4; i++) {
        uint64_t bits = 0;
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            uint16_t half;
            std::memcpy(&half, blocks + step_at_place(4 * i + j) * kRowBlockBytes, 2);
            bits |= static_cast<uint64_t>(half) << (16 * j);
        }
        fours[i] = bits;
    }
    return halves_to_float(as<u16l>(fours));
}

// The products of a row's next kLanes steps with one token's codes, by place.
[[gnu::always_inline]] inline u32v products_of_row(const uint8_t* blocks, const int8_t* x) {
    constexpr int kVectors = kLanes < 8 ? kLanes : 8, kSteps = kLanes / kVectors, kParts = kLanes < 8 ? kStep / kVectorBytes : 1;
    u32v sums[kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; i++) {
        const uint8_t* const codes = blocks + i * kSteps * kRowBlockBytes + 2;
        const auto code = [&](int, int j) {
            if constexpr (kSteps == 2) return as<u8v>(load_pieces<kStep>([&](int k) { return codes + k * kRowBlockBytes; })) ^ splat(kFullOffset);
            return load<u8v>(codes + kVectorBytes * j) ^ splat(kFullOffset);
        };
        i32v acc[1][1];
        dot<kMaxFull, kParts>(acc, 0, code, [&](int, int j) { return load<i32v>(x + i * kSteps * kStep + kVectorBytes * j); });
        sums[i] = as<u32v>(acc[0][0]);
    }
    sum_squares<kVectors>(sums);
    return sums[0];
}

// acc += the product of one step of a group with all tokens.
template <int Tokens>
[[gnu::always_inline]] inline void dot_row_step(const uint8_t* block, int64_t row_bytes, const FewRows& x, int64_t step, f32v (&acc)[Tokens]) {
    u8v codes[8];
    Scales w;
    read_row_step(block, row_bytes, codes, w.scale[0]);
    w.minimum[0] = w.scale[0] * kFullOffset;
    dot_step(codes, w, FewSteps<Q8_0, Tokens>(x, step), 0, acc);
}

// kLanes steps of a group: products and scales, a vector for each row.
struct RowTile {
    u32v products[kGroup], scales[kGroup];
};

// y += the tile's steps, one after the other; x begins at the first.
[[gnu::always_inline]] inline void add_row_tile(RowTile& tile, const FewSteps<Q8_0, 1>& x, f32v& y) {
    transpose_squares<kLanes>(tile.products);
    transpose_squares<kLanes>(tile.scales);
#pragma GCC unroll 16
    for (int s = 0; s < kLanes; s++) {
        const f32v scale = as<f32v>(tile.scales[place_of_step(s)]);
        y += to_float(as<i32v>(tile.products[place_of_step(s)])) * (scale * x.scales[s]);
        if constexpr (Q8_0::kHasMinimum) y -= (scale * kFullOffset) * x.sums[s];
    }
}

// One token: the results of n groups of rows, which begin at `group`.
[[gnu::noinline]] inline void matvec_row_by_row(const uint8_t* group, int64_t row_bytes, int n, Ahead ahead, const FewRows& x, int64_t n_columns, f32v* y) {
    const int64_t n_steps = n_columns / kStep, n_tiles = n_steps / kLanes, n_runs = (n_tiles + kRunTiles - 1) / kRunTiles;
    RowTile tiles[kRunTiles];
    for (int i = 0; i < n; i++, group += kGroup * row_bytes) {
        f32v acc[1] = {};
        for (int64_t run = 0; run < n_runs; run++) {
            const int64_t first = n_tiles * run / n_runs, stop = n_tiles * (run + 1) / n_runs;
            for (int r = 0; r < kGroup; r++) {
                const uint8_t* blocks = group + r * row_bytes + first * kLanes * kRowBlockBytes;
                for (int64_t t = first; t < stop; t++, blocks += kLanes * kRowBlockBytes) {
                    prefetch_weights<kLanes * kRowBlockBytes, 1>(blocks, ahead);
                    tiles[t - first].products[r] = products_of_row(blocks, x.codes + t * kLanes * kStep);
                    tiles[t - first].scales[r] = as<u32v>(scales_of_row(blocks));
                }
            }
            for (int64_t t = first; t < stop; t++) add_row_tile(tiles[t - first], {x, t * kLanes}, acc[0]);
        }
        for (int64_t s = n_tiles * kLanes; s < n_steps; s++) dot_row_step(group + s * kRowBlockBytes, row_bytes, x, s, acc);
        y[i] = acc[0];
    }
}

// The results of n groups of rows, which begin at `rows`; y is (group, token).
template <int Tokens>
inline void matvec_rows(const uint8_t* rows, int64_t row_bytes, int n, Ahead ahead, const FewRows& x, int64_t n_columns, f32v* y) {
    if constexpr (Tokens == 1) return matvec_row_by_row(rows, row_bytes, n, ahead, x, n_columns, y);
    for (int i = 0; i < n; i++) {
        const uint8_t* block = rows + i * kGroup * row_bytes;
        f32v acc[Tokens] = {};
        const uint8_t* next = block + kGroup * row_bytes;  // the next group, in the order of addresses
        for (int64_t step = 0; step < n_columns / kStep; step++, block += kRowBlockBytes, next += kGroup * kRowBlockBytes) {
            fetch<2>(next, kGroup * kRowBlockBytes);
            dot_row_step(block, row_bytes, x, step, acc);
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
