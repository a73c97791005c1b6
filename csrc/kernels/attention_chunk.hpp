// The products of attention, for a chunk of the keys and values of one head: scores, probabilities, and their sums of values.
#pragma once
#include "attention_stretch.hpp"
#include "tile.hpp"

namespace motley::MOTLEY_ISA {

constexpr int kMaxDim = kMaxHeadDim, kMaxTiles = kMaxDim / kTile;
constexpr int kStretches = kChunk / kStretch;
constexpr int kScoreRows = kVectorBytes == 64 ? 16 : 12;  // rows whose sums stay in registers while plain keys are multiplied
constexpr int kValueRows = kVectorBytes == 64 ? 16 : 4;  // rows whose outputs stay in registers while values are added

struct AttentionScratch {
    float q[kMaxRows][kMaxDim];
    int8_t q_codes[kMaxRows][kMaxDim];
    float q_scales[kMaxRows][kMaxTiles], q_sums[kMaxRows][kMaxTiles], q_half_sums[kMaxRows][2 * kMaxTiles];
    int32_t q_code_sums[2 * kMaxTiles];
    float out[kMaxRows][kMaxDim];
    float scores[kMaxRows][kChunk];
    float largest[kMaxRows], total[kMaxRows], chunk_total[kMaxRows];
    float rescale[kMaxRows + kLanes];  // of the results of earlier chunks; a vector more, as the last rows may begin within one
    RowKeys keys[kMaxRows];
    int64_t segment[kMaxRows];  // the one that `out` is of; -1: none yet
    float merged[kMaxRows][kMaxDim + 2];  // of the segments before, see merge_segment
    alignas(64) float panel[kMaxDim][kStretch];
    KeyCodes key_codes[kMaxTiles];
    alignas(64) uint8_t staged[kStretch * 128 + kStretch * 8];  // copy of a stretch's tile, see Stretch
};
static_assert(sizeof(AttentionScratch) <= kScratchBytes);

// Some rows of a task, all of one KV head, and the path of their token if they read on their own.
struct RowRange {
    int64_t head;
    int first, n;
    const Path* path = nullptr;
};

template <int Rows, int MaxCode>
void score_codes(AttentionScratch& s, int row, int64_t n_tiles, int stretch) {
    f32v score[Rows] = {};
    for (int64_t tile = 0; tile < n_tiles; tile++) {
        const KeyCodes& keys = s.key_codes[tile];
        i32v acc[1][Rows];
        dot<MaxCode, 8>(
            acc, 0, [&](int, int j) { return keys.codes[j]; },
            [&](int r, int j) { return splat4(s.q_codes[row + r] + tile * kTile + 4 * j); });
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {  // two statements: one can be rounded in two ways, and a row must not depend on Rows
            score[r] += to_float(acc[0][r]) * (keys.scale * s.q_scales[row + r][tile]);
            score[r] -= keys.minimum * s.q_sums[row + r][tile];
        }
    }
    for (int r = 0; r < Rows; r++) store(s.scores[row + r] + stretch * kStretch, score[r]);
}

template <int MaxCode>
void score_code_rows(AttentionScratch& s, const RowRange& rows, int64_t n_tiles, int stretch) {
    in_tiles<8>(rows.n, [&](auto count, int64_t r) { score_codes<count.value, MaxCode>(s, rows.first + r, n_tiles, stretch); });
}

// Four sums of a quarter of the dims each, added in their order. With few rows they are computed side by side: each addition
// waits for the one before it.
template <int Rows>
void score_floats(AttentionScratch& s, int row, int64_t dim, int stretch) {
    constexpr int kQuarters = 4;
    const int64_t share = dim / kQuarters;
    f32v score[Rows] = {};
    const auto add = [&](f32v (&sums)[Rows], int64_t d) {
        f32v keys = load<f32v>(s.panel[d]);
        keep_in_register(keys);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; r++) sums[r] += keys * s.q[row + r][d];
    };
    if constexpr (kQuarters * Rows <= kScoreRows) {
        f32v sums[kQuarters][Rows] = {};
        for (int64_t d = 0; d < share; d++)
#pragma GCC unroll 4
            for (int i = 0; i < kQuarters; i++) add(sums[i], i * share + d);
        for (int64_t d = kQuarters * share; d < dim; d++) add(sums[kQuarters - 1], d);
        for (int r = 0; r < Rows; r++) score[r] = ((sums[0][r] + sums[1][r]) + sums[2][r]) + sums[3][r];
    } else {
        for (int i = 0; i < kQuarters; i++) {
            f32v sums[Rows] = {};
            for (int64_t d = i * share, end = i + 1 < kQuarters ? d + share : dim; d < end; d++) add(sums, d);
            for (int r = 0; r < Rows; r++) score[r] = i ? score[r] + sums[r] : sums[r];
        }
    }
    for (int r = 0; r < Rows; r++) store(s.scores[row + r] + stretch * kStretch, score[r]);
}

inline void score_stretch(const AttentionArgs& a, const Stretch& keys, const RowRange& rows, int stretch, AttentionScratch& s) {
    for (int64_t tile = 0; tile < a.shape.n_tiles; tile++) {
        const TileCells cells = keys.cells(tile, s.staged);
        if (is_float_kind(a.k.kind))
            read_key_floats(a.k.kind, cells, s.panel + tile * kTile);
        else
            read_key_codes(a.k.kind, cells, s.key_codes[tile]);
    }
    if (is_float_kind(a.k.kind))
        in_tiles<kScoreRows>(rows.n, [&](auto count, int64_t r) { score_floats<count.value>(s, rows.first + r, a.shape.dim, stretch); });
    else if (run_of(max_code_of(a.k.kind)) == 8)
        score_code_rows<15>(s, rows, a.shape.n_tiles, stretch);
    else if (run_of(max_code_of(a.k.kind)) == 4)
        score_code_rows<31>(s, rows, a.shape.n_tiles, stretch);
    else
        score_code_rows<kMaxFull>(s, rows, a.shape.n_tiles, stretch);
}

// Scores of a chunk → probabilities relative to the largest score so far. The row's earlier results have to be multiplied by
// e^rescale: see softmax_chunk.
inline void take_exponentials(AttentionScratch& s, int row, int64_t first, int n_stretches) {
    const RowKeys& keys = s.keys[row];
    f32v most = splat(s.largest[row]);
    for (int i = 0; i < n_stretches; i++) {
        const int64_t key = first + i * kStretch;
        f32v score = load<f32v>(s.scores[row] + i * kStretch);
        if (key < keys.low || key + kStretch - 1 > keys.high) {
            const i32v low = lane_numbers() < splat(static_cast<int32_t>(keys.low - key < kLanes ? keys.low - key : kLanes));
            const i32v high = lane_numbers() > splat(static_cast<int32_t>(keys.high - key > -1 ? keys.high - key : -1));
            score = (low | high) ? splat(-INFINITY) : score;
            store(s.scores[row] + i * kStretch, score);
        }
        most = score > most ? score : most;
    }
    const float largest = max_lanes(most);
    const float base = largest == -INFINITY ? 0.0f : largest;  // no visible key yet: e^-inf = 0, not NaN
    f32v total = {};
    for (int i = 0; i < n_stretches; i++) {
        const f32v p = vexp_below_zero(load<f32v>(s.scores[row] + i * kStretch) - base);
        total += p;
        store(s.scores[row] + i * kStretch, p);
    }
    s.rescale[row] = s.largest[row] - base;
    s.chunk_total[row] = sum_lanes(total);
    s.largest[row] = largest;
}

// Scores of a chunk → probabilities, totals, and the factors of earlier outputs, a row in each lane.
inline void softmax_chunk(AttentionScratch& s, const RowRange& rows, int64_t first, int n_stretches) {
    for (int r = rows.first; r < rows.first + rows.n; r++) take_exponentials(s, r, first, n_stretches);
    for (int r = rows.first; r < rows.first + rows.n; r += kLanes)  // lanes of other rows are not read before they are written
        store(s.rescale + r, vexp_below_zero(load<f32v>(s.rescale + r)));
    for (int r = rows.first; r < rows.first + rows.n; r++) s.total[r] = s.total[r] * s.rescale[r] + s.chunk_total[r];
}

using ChunkCells = TileCells[kStretches];  // of one tile

// Adds the values of `Halves` halves of tiles, from half `First` of `tile` on: one, its two, or those of the next tile, too.
template <int Kind, int Rows, int First, int Halves>
void add_values(const ChunkCells* cells, int64_t tile, int row, int64_t n_keys, AttentionScratch& s) {
    constexpr bool kIsScaled = Kind > kCacheBF16;
    constexpr int kTiles = (Halves + 1) / 2;
    f32v out[Rows][Halves][kValueVectors], taken[Rows][kTiles] = {};
    const int64_t at = tile * kTile + First * 16;
    for (int r = 0; r < Rows; r++)
        for (int h = 0; h < Halves; h++)
            for (int k = 0; k < kValueVectors; k++) out[r][h][k] = load<f32v>(s.out[row + r] + at + 16 * h + kLanes * k) * s.rescale[row + r];
    for (int i = 0; i * kStretch < n_keys; i++) {
        const int n = n_keys - i * kStretch < kStretch ? static_cast<int>(n_keys - i * kStretch) : kStretch;
        alignas(64) float scaled[kTiles][Rows][kStretch];
        for (int k = 0; kIsScaled && k < kTiles; k++) {
            f32v scale, minimum;
            read_value_scales<Kind>(cells[k][i], scale, minimum);
            for (int r = 0; r < Rows; r++) {
                f32v p = load<f32v>(s.scores[row + r] + i * kStretch);
                if (n < kStretch) p = lane_numbers() < splat(n) ? p : f32v{};
                if constexpr (Kind != kCacheQ8_0) {  // one product for both cases: two could be rounded in two ways
                    const f32v known = n < kStretch ? (p == 0.0f ? f32v{} : minimum) : minimum;
                    taken[r][k] += p * known;
                }
                store(scaled[k][r], p * scale);
            }
        }
        for (int t = 0; t < n; t++) {
#pragma GCC unroll 4
            for (int h = 0; h < Halves; h++) {
                f32v v[kValueVectors];
                read_value<Kind>(cells[h / 2][i], t, (First + h) % 2, v);
#pragma GCC unroll 16
                for (int r = 0; r < Rows; r++) {
                    const float p = kIsScaled ? scaled[h / 2][r][t] : s.scores[row + r][i * kStretch + t];
                    for (int k = 0; k < kValueVectors; k++) out[r][h][k] += v[k] * p;
                }
            }
        }
    }
    for (int r = 0; r < Rows; r++)
        for (int h = 0; h < Halves; h++) {
            const float less = kIsScaled ? sum_lanes(taken[r][h / 2]) : 0.0f;
            for (int k = 0; k < kValueVectors; k++) store(s.out[row + r] + at + 16 * h + kLanes * k, out[r][h][k] - less);
        }
}

// Adds the values of a chunk's n_keys keys. Each addition waits for the one before it, so that few rows take several halves
// of tiles side by side.
template <int Kind>
void add_chunk(const AttentionArgs& a, const Stretch values[kStretches], int64_t n_keys, const RowRange& rows, AttentionScratch& s) {
    alignas(64) uint8_t staged[2][kStretches][sizeof s.staged];
    for (int64_t tile = 0; tile < a.shape.n_tiles; tile += 2) {
        const int n_tiles = tile + 1 < a.shape.n_tiles ? 2 : 1;
        ChunkCells cells[2];
        for (int k = 0; k < n_tiles; k++)
            for (int i = 0; i * kStretch < n_keys; i++) cells[k][i] = values[i].cells(tile + k, staged[k][i]);
        in_tiles<kValueRows>(rows.n, [&](auto count, int64_t r) {
            constexpr int kRows = count.value;
            const int row = rows.first + static_cast<int>(r);
            if constexpr (kRows == 1)
                if (n_tiles == 2) return add_values<Kind, kRows, 0, 4>(cells, tile, row, n_keys, s);
            for (int k = 0; k < n_tiles; k++) {
                if constexpr (kRows <= (kVectorBytes == 64 ? 8 : 2)) {
                    add_values<Kind, kRows, 0, 2>(cells + k, tile + k, row, n_keys, s);
                } else {
                    add_values<Kind, kRows, 0, 1>(cells + k, tile + k, row, n_keys, s);
                    add_values<Kind, kRows, 1, 1>(cells + k, tile + k, row, n_keys, s);
                }
            }
        });
    }
}

inline void add_chunk(const AttentionArgs& a, const Stretch values[kStretches], int64_t n_keys, const RowRange& rows, AttentionScratch& s) {
    switch (a.v.kind) {
        case kCacheF32: return add_chunk<kCacheF32>(a, values, n_keys, rows, s);
        case kCacheF16: return add_chunk<kCacheF16>(a, values, n_keys, rows, s);
        case kCacheBF16: return add_chunk<kCacheBF16>(a, values, n_keys, rows, s);
        case kCacheQ8_0: return add_chunk<kCacheQ8_0>(a, values, n_keys, rows, s);
        case kCacheQ5_1: return add_chunk<kCacheQ5_1>(a, values, n_keys, rows, s);
        case kCacheQ5_0: return add_chunk<kCacheQ5_0>(a, values, n_keys, rows, s);
        case kCacheQ4_1: return add_chunk<kCacheQ4_1>(a, values, n_keys, rows, s);
        case kCacheQ4_0: return add_chunk<kCacheQ4_0>(a, values, n_keys, rows, s);
        case kCacheIQ4_NL: return add_chunk<kCacheIQ4_NL>(a, values, n_keys, rows, s);
    }
}

}  // namespace motley::MOTLEY_ISA
