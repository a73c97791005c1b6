// One token times rows of Q8_0 blocks as in a file: a *tile* is kLanes steps of kGroup rows.
//
// A row's steps are read together: their products are whole numbers, whose sums may be made in any order. When all rows of
// a tile are there, products and scales are transposed, and added step by step with a row in each lane, as everywhere.
#pragma once
#include "few.hpp"
#include "transpose.hpp"

namespace motley::MOTLEY_ISA {

constexpr int kRowBlockBytes = Q8_0::kBytes;
constexpr int kRowTileBytes = kLanes * kRowBlockBytes;  // of one row

// Products and scales, a vector for each row. The product of step s is in lane place_of_step(s), its scale in lane s.
struct RowTile {
    u32v products[kGroup], scales[kGroup];
};

#if MOTLEY_VECTOR_BYTES == 64

constexpr int place_of_step(int step) { return place_of_half(step); }

// Two blocks (68 bytes) are read as they are, in vectors of 64 bytes, which needs half of the instructions of gathering their
// codes. Words of four bytes:
//
//     0      scale of the first block, its codes 0 and 1           the *head*: of all pairs of a tile in one vector
//     1-8    its codes 2 … 31, scale of the second block           }  the *body*, a vector
//     9-16   codes 0 … 31 of the second block                      }
//
// The activations have the same order, with zeros where the scales are.
constexpr int kPairBytes = 2 * kRowBlockBytes, kTilePairs = kLanes / 2;
using u16h = uint16_t __attribute__((vector_size(32)));
using u32h = uint32_t __attribute__((vector_size(32)));
using u64h = uint64_t __attribute__((vector_size(32)));
using u32q = uint32_t __attribute__((vector_size(16)));
using u64q = uint64_t __attribute__((vector_size(16)));

struct TileCodes {
    i32v bodies[kTilePairs], heads;
};

// A word for each pair → the lanes of sum_rows that have the sums of first blocks.
[[gnu::always_inline]] inline u32v at_first_blocks(u32h words) {
    return __builtin_shufflevector(words, u32h{}, 0, 1, 2, 3, 8, 8, 8, 8, 4, 5, 6, 7, 8, 8, 8, 8);
}

inline void lay_out_codes(const int8_t* x, TileCodes& codes) {
    u32h heads;
    for (int i = 0; i < kTilePairs; i++) {
        const u16v pair = load<u16v>(x + 2 * kStep * i);
        codes.bodies[i] = as<i32v>(__builtin_shufflevector(pair, u16v{}, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 32,  //
                                                           16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31));
        heads[i] = static_cast<uint32_t>(pair[0]) << 16;
    }
    codes.heads = as<i32v>(at_first_blocks(heads));
}

[[gnu::always_inline]] inline u32h heads_of_pairs(const uint8_t* blocks) {
    const auto two = [&](int i) {
        const uint8_t* const pair = blocks + i * kPairBytes;
        return as<u64q>(__builtin_shufflevector(load<u32q>(pair), load<u32q>(pair + kPairBytes), 0, 4, 1, 5));
    };
    const auto four = [&](int i) { return __builtin_shufflevector(two(i), two(i + 2), 0, 2); };
    return as<u32h>(__builtin_shufflevector(four(0), four(4), 0, 1, 2, 3));
}

// Word 8 of each pair, which is word 7 of its body.
[[gnu::always_inline]] inline u32h middles_of_pairs(const u8v bodies[kTilePairs]) {
    const auto half = [&](int i) { return __builtin_shufflevector(as<u32v>(bodies[i]), as<u32v>(bodies[i]), 0, 1, 2, 3, 4, 5, 6, 7); };
    const auto two = [&](int i) { return as<u64h>(__builtin_shufflevector(half(i), half(i + 1), 2, 10, 3, 11, 6, 14, 7, 15)); };
    const auto four = [&](int i) { return __builtin_shufflevector(two(i), two(i + 2), 1, 5, 3, 7); };
    return as<u32h>(__builtin_shufflevector(four(0), four(4), 2, 3, 6, 7));
}

inline i32v dot_vector(u8v codes, i32v x) {
    i32v acc[1][1];
    dot<kMaxFull, 1>(acc, 0, [&](int, int) { return codes; }, [&](int, int) { return x; });
    return acc[0][0];
}

// Row r of a tile, which begins at `blocks`. Prefetches one line at a time: nine at once would keep loads waiting.
[[gnu::always_inline]] inline void read_tile_row(const uint8_t* blocks, const TileCodes& x, RowTile& tile, int r, Ahead ahead) {
    u8v bodies[kTilePairs];
    u32v sums[kTilePairs];
#pragma GCC unroll 8
    for (int i = 0; i < kTilePairs; i++) {
        prefetch_weights<kPairBytes, 1>(blocks + i * kPairBytes + ahead.bytes, ahead);
        bodies[i] = load<u8v>(blocks + i * kPairBytes + 4) ^ splat(kFullOffset);
        sums[i] = as<u32v>(dot_vector(bodies[i], x.bodies[i]));
    }
    const u32h heads = heads_of_pairs(blocks), offset = u32h{} + 0x01010101u * kFullOffset;
    const i32v rest = dot_vector(as<u8v>(at_first_blocks(heads ^ offset)), x.heads);
    tile.products[r] = sum_rows<kTilePairs>(sums) + as<u32v>(rest);
    const u16h halves = __builtin_shufflevector(as<u16h>(heads), as<u16h>(middles_of_pairs(bodies) ^ offset),  //
                                                0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31);
    tile.scales[r] = as<u32v>(halves_to_float(as<u16l>(halves)));
}

#else

constexpr int place_of_step(int step) { return step; }

struct TileCodes {
    i32v steps[kLanes][kStep / kVectorBytes];
};

inline void lay_out_codes(const int8_t* x, TileCodes& codes) { std::memcpy(&codes, x, sizeof codes); }

// The scales of a row's next kLanes steps. Joined as whole numbers: inserting them into a vector takes longer.
[[gnu::always_inline]] inline f32v scales_of_row(const uint8_t* blocks) {
    using Fours = uint64_t __attribute__((vector_size(kVectorBytes / 2)));
    Fours fours{};
#pragma GCC unroll 4
    for (int i = 0; i < kLanes / 4; i++) {
        uint64_t bits = 0;
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            uint16_t half;
            std::memcpy(&half, blocks + (4 * i + j) * kRowBlockBytes, 2);
            bits |= static_cast<uint64_t>(half) << (16 * j);
        }
        fours[i] = bits;
    }
    return halves_to_float(as<u16l>(fours));
}

// Row r of a tile, which begins at `blocks`.
[[gnu::always_inline]] inline void read_tile_row(const uint8_t* blocks, const TileCodes& x, RowTile& tile, int r, Ahead ahead) {
    u32v sums[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes; i++) {
        const uint8_t* const codes = blocks + i * kRowBlockBytes + 2;
        prefetch_weights<kRowBlockBytes, 1>(blocks + i * kRowBlockBytes + ahead.bytes, ahead);
        i32v acc[1][1];
        dot<kMaxFull, kStep / kVectorBytes>(
            acc, 0, [&](int, int j) { return load<u8v>(codes + kVectorBytes * j) ^ splat(kFullOffset); }, [&](int, int j) { return x.steps[i][j]; });
        sums[i] = as<u32v>(acc[0][0]);
    }
    tile.products[r] = sum_rows<kLanes>(sums);
    tile.scales[r] = as<u32v>(scales_of_row(blocks));
}

#endif

// The tiles of a group that is read, and of the group before; and one token's activations.
constexpr int64_t kMaxTiledColumns = 28 << 10;
struct RowTiles {
    static constexpr int64_t kMaxTiles = kMaxTiledColumns / kStep / kLanes;
    RowTile tiles[2][kMaxTiles];
    TileCodes codes[kMaxTiles];
};

// y += the tile's steps, one after the other; x begins at the first.
[[gnu::always_inline]] inline void add_row_tile(const RowTile& tile, const FewSteps<Q8_0, 1>& x, f32v& y) {
    u32v products[kLanes], scales[kLanes];  // in registers: in place, all of the steps would be written back
#pragma GCC unroll 16
    for (int r = 0; r < kGroup; r++) {
        products[r] = tile.products[r];
        scales[r] = tile.scales[r];
    }
    transpose_squares<kLanes>(products);
    transpose_squares<kLanes>(scales);
#pragma GCC unroll 16
    for (int s = 0; s < kLanes; s++) {
        const f32v scale = as<f32v>(scales[s]);
        y += to_float(as<i32v>(products[place_of_step(s)])) * (scale * x.scales[s]);
        if constexpr (Q8_0::kHasMinimum) y -= (scale * kFullOffset) * x.sums[s];
    }
}

}  // namespace motley::MOTLEY_ISA
