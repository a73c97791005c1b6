// softmax(scale · q·kᵀ) · v over the paged cache, computed directly from its packed tiles.
//
// A task is up to 64 *rows*: the queries of some KV heads' groups for some tokens of one sequence. It reads the keys 128 at a
// time (a chunk), for one head after the other, as they follow each other in a block: memory read in the order of addresses is
// half as fast again as one head's parts of all blocks. Each kLanes keys (a stretch) are in the lanes of a vector:
//
//     s = scale_k · (codes_k · codes_q) - minimum_k · Σq            scores, for each tile of 32 dims
//     m' = max(m, s),  p = e^(s - m'),  l = l·e^(m - m') + Σp       online softmax
//     o = o·e^(m - m') + Σ (p · scale_v) · codes_v - Σ p · minimum_v
//
// So scales are applied to scores and probabilities, not to codes. Plain types skip them.
//
// A row's keys are divided into *segments*, up to 16, at positions that depend on the row's own position only. Each segment
// starts with m = -inf, l = 0, o = 0, and the segments' results are merged in their order. If there are too few tasks for the
// threads (a token of one sequence), several tasks share the segments, and attention_join merges them. So a row has the same
// bits with any number of rows, threads and splits, and wherever its blocks begin.
//
// If a sequence's rows are a tree, they read the chunks before the batch's first key together. From there on each row
// reads its own path, as if its ancestors' keys were next to each other: so it has the bits of a row without a tree.
#include "cache_types.hpp"
#include "hadamard.hpp"
#include "quantize.hpp"
#include "tile.hpp"

namespace motley::MOTLEY_ISA {
namespace {

constexpr int kMaxRows = kMaxQueryGroup, kMaxDim = kMaxHeadDim, kChunk = 128, kMaxTiles = kMaxDim / kTile;
constexpr int kMaxSegments = 16;     // of a row
constexpr int kMinSegmentLog2 = 8;   // keys, a multiple of kChunk
static_assert((1 << kMinSegmentLog2) % kChunk == 0);
constexpr int kStretches = kChunk / kStretch;
constexpr int kScoreRows = kVectorBytes == 64 ? 16 : 12;  // rows whose sums stay in registers while plain keys are multiplied
constexpr int kValueRows = kVectorBytes == 64 ? 16 : 4;  // rows whose outputs stay in registers while values are added

// The keys that a row sees, low … high, as positions.
struct RowKeys {
    int64_t low, high;
    int segment_log2;  // of a segment's keys; segments begin at multiples of their size

    RowKeys() = default;
    RowKeys(const SequenceView& s, int64_t token, int64_t window) {
        high = s.position + (s.seen ? __builtin_popcountll(s.seen[token]) - 1 : token);
        low = window && high - window + 1 > s.first ? high - window + 1 : s.first;
        segment_log2 = kMinSegmentLog2;
        while (high - low + 1 > int64_t{kMaxSegments - 1} << segment_log2) segment_log2++;  // one more where they begin within one
    }
    int64_t first_segment() const { return low >> segment_log2; }
    int64_t last_segment() const { return high >> segment_log2; }
};

struct Scratch {
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
static_assert(sizeof(Scratch) <= kScratchBytes);

// The division of the work into tasks. It depends only on the arguments, so all threads compute the same division.
struct Cut {
    int64_t group, tokens_per_task;
    int64_t max_heads = kMaxRows;  // KV heads of a task
    int64_t n_tasks = 0;           // before splits
    int n_splits = 1;
};

// How many tasks a sequence has: tiles of queries, and heads of each.
struct SequenceTasks {
    int64_t n_tiles, heads_per_task, n_parts;  // n_parts: of the heads

    SequenceTasks(const SequenceView& s, const AttentionArgs& a, const Cut& cut) {
        n_tiles = (s.n_tokens + cut.tokens_per_task - 1) / cut.tokens_per_task;
        const int64_t fit = kMaxRows / (cut.group * (s.n_tokens < cut.tokens_per_task ? s.n_tokens : cut.tokens_per_task));
        heads_per_task = fit < 1 ? 1 : (fit < cut.max_heads ? fit : cut.max_heads);
        n_parts = (a.shape.n_heads + heads_per_task - 1) / heads_per_task;
    }
    int64_t n() const { return n_tiles * n_parts; }
};

int64_t count_tasks(const AttentionArgs& a, const Cut& cut) {
    int64_t n = 0;
    for (int64_t i = 0; i < a.batch->n_sequences; i++)
        if (a.batch->sequences[i].n_tokens) n += SequenceTasks(a.batch->sequences[i], a, cut).n();
    return n;
}

// As few tasks as give each thread about four: first keys are split, as parts of them are contiguous, then heads.
Cut cut_work(const AttentionArgs& a) {
    Cut cut{.group = a.n_heads / a.shape.n_heads, .tokens_per_task = 1};
    cut.tokens_per_task = kMaxRows / cut.group < 1 ? 1 : kMaxRows / cut.group;
    cut.n_tasks = count_tasks(a, cut);
    if (!cut.n_tasks || a.n_threads < 2) return cut;
    int64_t most = 0;  // segments of a sequence's first row
    for (int64_t i = 0; i < a.batch->n_sequences; i++) {
        const RowKeys keys(a.batch->sequences[i], 0, a.window);
        const int64_t n = keys.last_segment() - keys.first_segment() + 1;
        most = n > most ? n : most;
    }
    const int64_t room = a.n_partial / (a.n_tokens * a.n_heads * (a.shape.dim + 2));
    const auto n_more = [&] { return (4 * a.n_threads + cut.n_tasks * cut.n_splits - 1) / (cut.n_tasks * cut.n_splits); };
    if (room >= kMaxSegments) cut.n_splits = static_cast<int>(n_more() < most ? n_more() : most);
    if (n_more() > 1) {
        cut.max_heads = a.shape.n_heads / n_more() < 1 ? 1 : a.shape.n_heads / n_more();
        cut.n_tasks = count_tasks(a, cut);
    }
    return cut;
}

// The path to one row of a tree: its ancestors and itself, the first one first. Keys from position `base` on are of the tree.
struct Path {
    int64_t base;
    uint8_t rows[kMaxTreeRows];
    Path(const SequenceView& s, int64_t token) : base(s.position) {
        int n = 0;
        for (uint64_t left = s.seen[token]; left; left &= left - 1) rows[n++] = static_cast<uint8_t>(__builtin_ctzll(left));
    }
    int64_t place(int64_t key) const { return key < base ? key : base + rows[key - base]; }
};

struct Task {
    const SequenceView* sequence;
    int64_t first_head, n_heads;  // KV heads
    int64_t first_token, n_tokens;  // of the sequence
    int split;
};

Task find_task(const AttentionArgs& a, const Cut& cut, int64_t i) {
    Task task{a.batch->sequences, 0, 0, 0, 0, static_cast<int>(i % cut.n_splits)};
    i /= cut.n_splits;
    for (;; task.sequence++) {
        if (!task.sequence->n_tokens) continue;
        const SequenceTasks tasks(*task.sequence, a, cut);
        if (i >= tasks.n()) {
            i -= tasks.n();
            continue;
        }
        task.first_head = i % tasks.n_parts * tasks.heads_per_task;
        const int64_t heads_left = a.shape.n_heads - task.first_head;
        task.n_heads = heads_left < tasks.heads_per_task ? heads_left : tasks.heads_per_task;
        task.first_token = i / tasks.n_parts * cut.tokens_per_task;
        const int64_t left = task.sequence->n_tokens - task.first_token;
        task.n_tokens = left < cut.tokens_per_task ? left : cut.tokens_per_task;
        return task;
    }
}

// A task's rows are in the order (KV head, token, query head of the group).
int64_t rows_per_head(const Cut& cut, const Task& task) { return task.n_tokens * cut.group; }

int64_t token_of(const Cut& cut, const Task& task, int64_t row) { return task.first_token + row % rows_per_head(cut, task) / cut.group; }

// A task's row as one number of (token, head).
int64_t row_number(const AttentionArgs& a, const Cut& cut, const Task& task, int64_t row) {
    const int64_t head = task.first_head + row / rows_per_head(cut, task);
    return (task.sequence->first_token + token_of(cut, task, row)) * a.n_heads + head * cut.group + row % cut.group;
}

// A segment's result: m, l, then o (see the top of the file).
void clear_segment(float* x) {
    x[0] = -INFINITY;
    x[1] = 0;
}

// Adds a segment to the merged ones before it. Not inlined: it is compiled once, so it rounds the same for all callers.
[[gnu::noinline]] void merge_segment(float* merged, const float* segment, int64_t dim) {
    if (segment[1] == 0) return;  // no visible key
    if (merged[1] == 0) {
        std::memcpy(merged, segment, (dim + 2) * sizeof(float));
        return;
    }
    const float largest = merged[0] > segment[0] ? merged[0] : segment[0];
    const float before = std::exp(merged[0] - largest), factor = std::exp(segment[0] - largest);
    merged[0] = largest;
    for (int64_t i = 1; i < dim + 2; i++) merged[i] = merged[i] * before + segment[i] * factor;
}

// Loads queries, padded to whole tiles and multiplied by the scale; also as codes if keys are codes.
void read_queries(const AttentionArgs& a, const Cut& cut, const Task& task, int n_rows, Scratch& s) {
    const int64_t padded = a.shape.n_tiles * kTile;
    for (int r = 0; r < n_rows; r++) {
        const float* q = a.q + row_number(a, cut, task, r) * a.shape.dim;
        for (int64_t d = 0; d < padded; d++) s.q[r][d] = d < a.shape.dim ? q[d] * a.scale : 0.0f;
        if (!is_float_kind(a.k.kind))
            quantize_row(s.q[r], padded, s.q_codes[r], s.q_scales[r], s.q_sums[r], s.q_half_sums[r], s.q_code_sums);
        s.keys[r] = RowKeys(*task.sequence, token_of(cut, task, r), a.window);
        s.segment[r] = -1;
        clear_segment(s.merged[r]);
    }
}

// A stretch of a head's keys in a store: kStretch positions from `first` on, a multiple of kStretch. Its division is done once
// for all tiles.
class Stretch {
public:
    Stretch() = default;
    Stretch(const CacheStoreView& store, const CacheShape& shape, const SequenceView& sequence, int64_t head, int64_t first, int64_t n_keys,
            const Path* path = nullptr)
        : store_(&store), shape_(&shape), sequence_(&sequence), path_(path), head_(head), first_(first), n_keys_(n_keys) {
        const bool is_whole = shape.block_size % kStretch == 0 && sequence_->first % kStretch == 0 && first >= sequence_->first &&
                              first < n_keys && !(path && first + kStretch > path->base);
        if (is_whole) whole_ = cell(first);
    }

    // Whether the stretch is in one block, its keys next to each other.
    bool is_whole() const { return whole_ >= 0; }

    // Addresses in a tile. If the stretch is not whole, its cells are copied to `staged`.
    [[gnu::always_inline]] TileCells cells(int64_t tile, uint8_t* staged) const {
        if (!is_whole()) return copy(tile, staged);
        const int64_t i = whole_ + tile * shape_->block_size;
        return {store_->codes + i * shape_of(store_->kind).code_bytes, store_->high_bits ? store_->high_bits + 4 * i : nullptr,
                store_->scale ? store_->scale + i : nullptr, store_->minimum ? store_->minimum + i : nullptr};
    }

    // Prefetches a whole one: blocks of a head are far apart, and each is too short for the hardware prefetcher.
    [[gnu::always_inline]] void fetch_all() const {
        if (!is_whole()) return;
        const int64_t n_bytes = kStretch * shape_of(store_->kind).code_bytes;
        for (int64_t tile = 0; tile < shape_->n_tiles; tile++) {
            const TileCells found = cells(tile, nullptr);
            fetch(found.codes, n_bytes);
            if (found.scale) fetch(found.scale, 1);  // a prefetch of a null address takes as long as a miss of the TLB
            if (found.minimum) fetch(found.minimum, 1);
            if (found.high_bits) fetch(found.high_bits, 1);
        }
    }

private:
    // The number of a key's cell in the first tile.
    int64_t cell(int64_t key) const {
        key = (path_ ? path_->place(key) : key) - sequence_->first;
        const int64_t row = sequence_->blocks[key / shape_->block_size] * store_->n_rows + store_->first_row + head_;
        return row * shape_->n_tiles * shape_->block_size + key % shape_->block_size;
    }

    [[gnu::noinline]] TileCells copy(int64_t tile, uint8_t* staged) const {
        const KindShape kind = shape_of(store_->kind);
        uint8_t* high_bits = staged + kStretch * 128;
        auto* scale = reinterpret_cast<uint16_t*>(high_bits + 4 * kStretch);
        uint16_t* minimum = scale + kStretch;
        std::memset(staged, 0, kStretch * (128 + 8));
        for (int64_t t = first_ < sequence_->first ? sequence_->first - first_ : 0; t < kStretch && first_ + t < n_keys_; t++) {
            const int64_t i = cell(first_ + t) + tile * shape_->block_size;
            std::memcpy(staged + t * kind.code_bytes, store_->codes + i * kind.code_bytes, kind.code_bytes);
            if (kind.has_high_bits) std::memcpy(high_bits + 4 * t, store_->high_bits + 4 * i, 4);
            if (kind.has_scale) scale[t] = store_->scale[i];
            if (kind.has_minimum) minimum[t] = store_->minimum[i];
        }
        return {staged, high_bits, scale, minimum};
    }

    const CacheStoreView* store_;
    const CacheShape* shape_;
    const SequenceView* sequence_;
    const Path* path_;
    int64_t head_, first_, n_keys_, whole_ = -1;  // `whole_`: the first key's cell; -1: not whole
};

template <int Rows, int MaxCode>
void score_codes(Scratch& s, int row, int64_t n_tiles, int stretch) {
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

// Some rows of a task, all of one KV head, and the path of their token if they read on their own.
struct RowRange {
    int64_t head;
    int first, n;
    const Path* path = nullptr;
};

template <int MaxCode>
void score_code_rows(Scratch& s, const RowRange& rows, int64_t n_tiles, int stretch) {
    in_tiles<8>(rows.n, [&](auto count, int64_t r) { score_codes<count.value, MaxCode>(s, rows.first + r, n_tiles, stretch); });
}

// Four sums of a quarter of the dims each, added in their order. With few rows they are computed side by side: each addition
// waits for the one before it.
template <int Rows>
void score_floats(Scratch& s, int row, int64_t dim, int stretch) {
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

void score_stretch(const AttentionArgs& a, const Stretch& keys, const RowRange& rows, int stretch, Scratch& s) {
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
// e^rescale: see rescale_totals.
void take_exponentials(Scratch& s, int row, int64_t first, int n_stretches) {
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
void softmax_chunk(Scratch& s, const RowRange& rows, int64_t first, int n_stretches) {
    for (int r = rows.first; r < rows.first + rows.n; r++) take_exponentials(s, r, first, n_stretches);
    for (int r = rows.first; r < rows.first + rows.n; r += kLanes)  // lanes of other rows are not read before they are written
        store(s.rescale + r, vexp_below_zero(load<f32v>(s.rescale + r)));
    for (int r = rows.first; r < rows.first + rows.n; r++) s.total[r] = s.total[r] * s.rescale[r] + s.chunk_total[r];
}

using ChunkCells = TileCells[kStretches];  // of one tile

// Adds the values of `Halves` halves of tiles, from half `First` of `tile` on: one, its two, or those of the next tile, too.
template <int Kind, int Rows, int First, int Halves>
void add_values(const ChunkCells* cells, int64_t tile, int row, int64_t n_keys, Scratch& s) {
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
void add_chunk(const AttentionArgs& a, const Stretch values[kStretches], int64_t n_keys, const RowRange& rows, Scratch& s) {
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

void add_chunk(const AttentionArgs& a, const Stretch values[kStretches], int64_t n_keys, const RowRange& rows, Scratch& s) {
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

// The memory of segment i of a row in split attention: `row` is (token, head) as one number, the row's first segment is 0.
float* partial_segment(const AttentionArgs& a, int64_t row, int64_t i) {
    return a.partial + (row * kMaxSegments + i) * (a.shape.dim + 2);
}

// Ends a row's segment: merges it with those before it, or stores it for attention_join.
void end_segment(const AttentionArgs& a, const Cut& cut, const Task& task, int row, Scratch& s) {
    const RowKeys& keys = s.keys[row];
    const int64_t i = s.segment[row] - keys.first_segment();
    if (i < 0 || s.segment[row] > keys.last_segment()) return;  // only other rows of the task see it
    float segment[kMaxDim + 2];
    float* const to = cut.n_splits == 1 ? segment : partial_segment(a, row_number(a, cut, task, row), i);
    to[0] = s.largest[row];
    to[1] = s.total[row];
    std::memcpy(to + 2, s.out[row], a.shape.dim * sizeof(float));
    if (cut.n_splits == 1) merge_segment(s.merged[row], segment, a.shape.dim);
}

// Begins the segment of position `first` for some rows, unless they are within it.
void enter_segment(const AttentionArgs& a, const Cut& cut, const Task& task, int64_t first, const RowRange& rows, Scratch& s) {
    for (int r = rows.first; r < rows.first + rows.n; r++) {
        const int64_t segment = first >> s.keys[r].segment_log2;
        if (segment == s.segment[r]) continue;
        if (s.segment[r] >= 0) end_segment(a, cut, task, r, s);
        s.segment[r] = segment;
        s.largest[r] = -INFINITY;
        s.total[r] = 0;
        std::memset(s.out[r], 0, a.shape.n_tiles * kTile * sizeof(float));
    }
}

// Adds the keys at positions `first` … `stop` - 1, a chunk, to some rows. Meanwhile its values are prefetched, and the keys of
// the chunk that is read next.
void attend_chunk(const AttentionArgs& a, const Task& task, int64_t first, int64_t stop, const RowRange& rows, const RowRange& next_rows, int64_t next_first,
                  int64_t n_keys, Scratch& s) {
    const SequenceView& sequence = *task.sequence;
    const int n_stretches = static_cast<int>((stop - first + kStretch - 1) / kStretch);
    Stretch values[kStretches];
    for (int i = 0; i < n_stretches; i++) {
        const int64_t offset = i * kStretch;
        values[i] = Stretch(a.v, a.shape, sequence, rows.head, first + offset, n_keys, rows.path);
        if (!rows.path) {
            values[i].fetch_all();
            Stretch(a.k, a.shape, sequence, next_rows.head, next_first + offset, n_keys).fetch_all();
        }
        score_stretch(a, Stretch(a.k, a.shape, sequence, rows.head, first + offset, n_keys, rows.path), rows, i, s);
    }
    softmax_chunk(s, rows, first, n_stretches);
    add_chunk(a, values, stop - first, rows, s);
}

// The task's keys at positions `start` … `end` - 1, below `n_keys`; `start` is a multiple of kChunk.
struct KeyRange {
    int64_t start, end, n_keys;
};

// Adds keys to the rows of some tokens of each of the task's heads: `first` … `first` + `n` of a head's rows.
void attend_keys(const AttentionArgs& a, const Cut& cut, const Task& task, const KeyRange& keys, int first, int n, const Path* path, Scratch& s) {
    const auto rows_of = [&](int64_t i) {
        return RowRange{task.first_head + i, static_cast<int>(i * rows_per_head(cut, task)) + first, n, path};
    };
    for (int64_t chunk = keys.start; chunk < keys.end; chunk += kChunk) {
        const int64_t stop = keys.n_keys - chunk < kChunk ? keys.n_keys : chunk + kChunk;
        for (int64_t i = 0; i < task.n_heads; i++) {
            enter_segment(a, cut, task, chunk, rows_of(i), s);
            const bool is_last = i + 1 == task.n_heads;
            attend_chunk(a, task, chunk, stop, rows_of(i), rows_of(is_last ? 0 : i + 1), is_last ? chunk + kChunk : chunk, keys.n_keys, s);
        }
    }
}

void attend(const AttentionArgs& a, const Cut& cut, const Task& task, Scratch& s) {
    const int per_head = static_cast<int>(rows_per_head(cut, task)), n_rows = static_cast<int>(task.n_heads) * per_head;
    const SequenceView& sequence = *task.sequence;
    read_queries(a, cut, task, n_rows, s);
    int64_t n_keys = 0, lowest = s.keys[0].low;  // up to the last row's own key; in a tree, a later row may be less deep
    int segment_log2 = 0;
    for (int r = 0; r < per_head; r++) {
        n_keys = s.keys[r].high + 1 > n_keys ? s.keys[r].high + 1 : n_keys;
        lowest = s.keys[r].low < lowest ? s.keys[r].low : lowest;
        segment_log2 = s.keys[r].segment_log2 > segment_log2 ? s.keys[r].segment_log2 : segment_log2;
    }
    // A split begins where segments of all rows begin: their sizes are powers of two.
    const int64_t first_segment = lowest >> segment_log2, n_segments = ((n_keys - 1) >> segment_log2) + 1 - first_segment;
    const int64_t low = lowest / kChunk * kChunk;
    const auto begin = [&](int64_t split) { return (first_segment + n_segments * split / cut.n_splits) << segment_log2; };
    const int64_t start = begin(task.split) < low ? low : begin(task.split), end = begin(task.split + 1) < n_keys ? begin(task.split + 1) : n_keys;
    if (!sequence.seen) {
        attend_keys(a, cut, task, {start, end, n_keys}, 0, per_head, nullptr, s);
    } else {
        const int64_t base = sequence.position, own = base / kChunk * kChunk;  // the chunk of the tree's first key
        attend_keys(a, cut, task, {start, end < own ? end : own, base}, 0, per_head, nullptr, s);
        for (int64_t t = 0; t < task.n_tokens; t++) {
            const int row = static_cast<int>(t * cut.group);
            const Path path(sequence, task.first_token + t);
            const int64_t n_own = s.keys[row].high + 1;
            attend_keys(a, cut, task, {start < own ? own : start, end < n_own ? end : n_own, n_own}, row, static_cast<int>(cut.group), &path, s);
        }
    }
    for (int r = 0; r < n_rows; r++)
        if (s.segment[r] >= 0) end_segment(a, cut, task, r, s);
}

// The sum of a head's probabilities, relative to the largest score, with its sink.
float with_sink(const AttentionArgs& a, int64_t row, float largest, float total) {
    return a.sinks ? total + std::exp(a.sinks[row % a.n_heads] - largest) : total;
}

// Stores o / l of the merged segments, rotated back.
[[gnu::noinline]] void write_row(const AttentionArgs& a, int64_t row, float* merged) {
    const float total = with_sink(a, row, merged[0], merged[1]);
    float* const x = merged + 2;
    for (int64_t d = 0; d < a.shape.dim; d++) x[d] /= total;
    if (a.out_rotation) hadamard_stretches(x, a.shape.dim, a.out_rotation);
    std::memcpy(a.out + row * a.shape.dim, x, a.shape.dim * sizeof(float));
}

}  // namespace

void attention(const AttentionArgs& a, const Worker& worker) {
    auto& s = *reinterpret_cast<Scratch*>(worker.scratch);
    if (!a.n_heads || !a.n_tokens) return;
    const Cut cut = cut_work(a);
    for (int64_t i; (i = worker.take()) < cut.n_tasks * cut.n_splits;) {
        const Task task = find_task(a, cut, i);
        attend(a, cut, task, s);
        if (cut.n_splits > 1) continue;
        for (int64_t r = 0; r < task.n_heads * rows_per_head(cut, task); r++) write_row(a, row_number(a, cut, task, r), s.merged[r]);
    }
}

void attention_join(const AttentionArgs& a, const Worker& worker) {
    if (!a.n_heads || !a.n_tokens || cut_work(a).n_splits == 1) return;
    float* const merged = reinterpret_cast<float*>(worker.scratch);
    for (int64_t row; (row = worker.take()) < a.n_tokens * a.n_heads;) {
        const SequenceView *sequence = a.batch->sequences, *const end = sequence + a.batch->n_sequences;
        while (sequence != end && row / a.n_heads >= sequence->first_token + sequence->n_tokens) sequence++;
        if (sequence == end) return;
        const RowKeys keys(*sequence, row / a.n_heads - sequence->first_token, a.window);
        clear_segment(merged);
        for (int64_t i = keys.first_segment(); i <= keys.last_segment(); i++)
            merge_segment(merged, partial_segment(a, row, i - keys.first_segment()), a.shape.dim);
        write_row(a, row, merged);
    }
}

}  // namespace motley::MOTLEY_ISA
