// Q8_0 matrices in the file's layout, so that a mapped file needs no copy: rows of blocks, each a float16 scale and 32
// codes (int8). The number of rows is a multiple of kGroup. The results have the same bits as a repacked group's (formats.hpp).
//
//   one token        reads row after row, in the order of addresses, as the processor's own prefetching follows one stream better
//                    than many (row_tiles.hpp).
//   several tokens   transpose each step of a group in registers, and decode it once for all tokens.
#pragma once
#include "panel.hpp"
#include "row_tiles.hpp"

namespace motley::MOTLEY_ISA {

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

// acc += the product of one step of a group with all tokens.
template <int Tokens>
[[gnu::always_inline]] inline void dot_row_step(const uint8_t* block, int64_t row_bytes, const FewRows& x, int64_t step, f32v (&acc)[Tokens]) {
    u8v codes[8];
    Scales w;
    read_row_step(block, row_bytes, codes, w.scale[0]);
    w.minimum[0] = w.scale[0] * kFullOffset;
    dot_step(codes, w, FewSteps<Q8_0, Tokens>(x, step), 0, acc);
}

// One token: the results of n groups of rows, which begin at `group`. While a group is read, the tiles of the group before are
// added, a few after each row: adding them all at once would take so long that memory would have nothing to do.
[[gnu::noinline]] inline void matvec_row_by_row(const uint8_t* group, int64_t row_bytes, int n, Ahead ahead, const FewRows& x, int64_t n_columns, RowTiles& memory, f32v* y) {
    const int64_t n_steps = n_columns / kStep, n_tiles = n_steps / kLanes;
    for (int64_t t = 0; t < n_tiles; t++) lay_out_codes(x.codes + t * kLanes * kStep, memory.codes[t]);
    f32v acc[1] = {};
    const auto add_tiles = [&](const RowTile* tiles, int64_t from, int64_t to) {
        for (int64_t t = from; t < to; t++) add_row_tile(tiles[t], {x, t * kLanes}, acc[0]);
    };
    const auto finish = [&](int i) {
        for (int64_t s = n_tiles * kLanes; s < n_steps; s++) dot_row_step(group + i * kGroup * row_bytes + s * kRowBlockBytes, row_bytes, x, s, acc);
        y[i] = acc[0];
        acc[0] = f32v{};
    };
    RowTile *reading = memory.tiles[0], *waiting = memory.tiles[1];
    for (int i = 0; i < n; i++) {
        for (int r = 0; r < kGroup; r++) {
            const uint8_t* blocks = group + (i * kGroup + r) * row_bytes;
            for (int64_t t = 0; t < n_tiles; t++, blocks += kRowTileBytes) read_tile_row(blocks, memory.codes[t], reading[t], r, ahead);
            if (i > 0) add_tiles(waiting, n_tiles * r / kGroup, n_tiles * (r + 1) / kGroup);
        }
        if (i > 0) finish(i - 1);
        std::swap(reading, waiting);
    }
    add_tiles(waiting, 0, n_tiles);
    finish(n - 1);
}

// The results of n groups of rows, which begin at `rows`; y is (group, token).
template <int Tokens>
inline void matvec_rows(const uint8_t* rows, int64_t row_bytes, int n, Ahead ahead, const FewRows& x, int64_t n_columns, uint8_t* scratch, f32v* y) {
    if constexpr (Tokens == 1)
        if (n_columns <= kMaxTiledColumns) return matvec_row_by_row(rows, row_bytes, n, ahead, x, n_columns, *reinterpret_cast<RowTiles*>(scratch), y);
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
