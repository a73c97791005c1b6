// softmax(scale · q·kᵀ) · v over the paged cache, computed directly from its packed tiles.
//
// A task is one KV head and up to 64 *rows*: the queries of the head's group for some tokens of one sequence. It reads
// the keys 128 at a time (a chunk), each kLanes of them (a stretch) in the lanes of a vector:
//
//     s = scale_k · (codes_k · codes_q) - minimum_k · Σq            scores, for each tile of 32 dims
//     m' = max(m, s),  p = e^(s - m'),  l = l·e^(m - m') + Σp       online softmax
//     o = o·e^(m - m') + Σ (p · scale_v) · codes_v - Σ p · minimum_v
//
// So scales are applied to scores and probabilities, not to codes. Plain types skip them. If there are too few
// tasks for the threads (a token of one sequence), the keys are split, and attention_join combines the parts.
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
constexpr int kMaxSplits = 16;
constexpr int64_t kMinSplitKeys = 256;
constexpr int kStretches = kChunk / kStretch;
constexpr int kValueRows = kVectorBytes == 64 ? 16 : 4;  // rows whose outputs stay in registers while values are added

struct Scratch {
    float q[kMaxRows][kMaxDim];
    int8_t q_codes[kMaxRows][kMaxDim];
    float q_scales[kMaxRows][kMaxTiles], q_sums[kMaxRows][kMaxTiles], q_half_sums[kMaxRows][2 * kMaxTiles];
    int32_t q_code_sums[2 * kMaxTiles];
    float out[kMaxRows][kMaxDim];
    float scores[kMaxRows][kChunk];
    float largest[kMaxRows], total[kMaxRows], fade[kMaxRows];
    int64_t low[kMaxRows], high[kMaxRows];  // keys that a row sees: low … high
    alignas(64) float panel[kMaxDim][kStretch];
    KeyCodes key_codes[kMaxTiles];
    alignas(64) uint8_t staged[kStretch * 128 + kStretch * 8];  // copy of a stretch's tile, see cells_of
};
static_assert(sizeof(Scratch) <= kScratchBytes);

// The division of the work into tasks. It depends only on the arguments, so all threads compute the same division.
struct Cut {
    int64_t group, tokens_per_task, n_tasks;
    int n_splits;
};

int64_t n_query_tiles(const SequenceView& s, const Cut& cut) {
    return (s.n_tokens + cut.tokens_per_task - 1) / cut.tokens_per_task;
}

Cut cut_work(const AttentionArgs& a) {
    Cut cut{a.n_heads / a.shape.n_heads, 1, 0, 1};
    cut.tokens_per_task = kMaxRows / cut.group < 1 ? 1 : kMaxRows / cut.group;
    int64_t longest = 0;
    for (int64_t i = 0; i < a.batch->n_sequences; i++) {
        const SequenceView& s = a.batch->sequences[i];
        cut.n_tasks += n_query_tiles(s, cut) * a.shape.n_heads;
        const int64_t n_keys = s.position + s.n_tokens - s.first;
        longest = n_keys > longest ? n_keys : longest;
    }
    const int64_t wanted = 4 * a.n_threads, room = a.n_partial / (a.n_tokens * a.n_heads * (a.shape.dim + 2));
    int64_t splits = cut.n_tasks && a.n_threads > 1 ? (wanted + cut.n_tasks - 1) / cut.n_tasks : 1;
    splits = splits > longest / kMinSplitKeys ? longest / kMinSplitKeys : splits;
    splits = splits > room ? room : (splits > kMaxSplits ? kMaxSplits : splits);
    cut.n_splits = splits < 1 ? 1 : static_cast<int>(splits);
    return cut;
}

// The path to one row of a tree: its ancestors and itself, the first one first. Keys from `base` on are of the tree.
struct Path {
    int64_t base;
    uint8_t rows[kMaxTreeRows];
    Path(const SequenceView& s, int64_t token) : base(s.position - s.first) {
        int n = 0;
        for (uint64_t left = s.seen[token]; left; left &= left - 1) rows[n++] = static_cast<uint8_t>(__builtin_ctzll(left));
    }
    int64_t place(int64_t key) const { return key < base ? key : base + rows[key - base]; }
};

struct Task {
    const SequenceView* sequence;
    int64_t head, first_token, n_tokens;  // of the KV heads; tokens of the sequence
    int split;
};

Task find_task(const AttentionArgs& a, const Cut& cut, int64_t i) {
    Task task{a.batch->sequences, 0, 0, 0, static_cast<int>(i % cut.n_splits)};
    i /= cut.n_splits;
    while (i >= n_query_tiles(*task.sequence, cut) * a.shape.n_heads)
        i -= n_query_tiles(*task.sequence++, cut) * a.shape.n_heads;
    task.head = i % a.shape.n_heads;
    task.first_token = i / a.shape.n_heads * cut.tokens_per_task;
    const int64_t left = task.sequence->n_tokens - task.first_token;
    task.n_tokens = left < cut.tokens_per_task ? left : cut.tokens_per_task;
    return task;
}

const float* query_of(const AttentionArgs& a, const Cut& cut, const Task& task, int row) {
    const int64_t token = task.sequence->first_token + task.first_token + row / cut.group;
    return a.q + (token * a.n_heads + task.head * cut.group + row % cut.group) * a.shape.dim;
}

// Loads queries, padded to whole tiles and multiplied by the scale; also as codes if keys are codes.
void read_queries(const AttentionArgs& a, const Cut& cut, const Task& task, int n_rows, Scratch& s) {
    const int64_t padded = a.shape.n_tiles * kTile;
    for (int r = 0; r < n_rows; r++) {
        const float* q = query_of(a, cut, task, r);
        for (int64_t d = 0; d < padded; d++) s.q[r][d] = d < a.shape.dim ? q[d] * a.scale : 0.0f;
        if (!is_float_kind(a.k.kind))
            quantize_row(s.q[r], padded, s.q_codes[r], s.q_scales[r], s.q_sums[r], s.q_half_sums[r], s.q_code_sums);
        const int64_t token = task.first_token + r / cut.group;
        const int64_t depth = task.sequence->seen ? __builtin_popcountll(task.sequence->seen[token]) - 1 : token;
        const int64_t at = task.sequence->position + depth - task.sequence->first;
        s.high[r] = at;
        s.low[r] = a.window && at - a.window + 1 > 0 ? at - a.window + 1 : 0;
        s.largest[r] = -INFINITY;
        s.total[r] = 0;
        std::memset(s.out[r], 0, padded * sizeof(float));
    }
}

// Addresses in a tile of the stretch of keys that begins at `first`, a multiple of kStretch. If block size is no
// multiple of kStretch, or keys of a tree's path are not next to each other, the cells are copied to `staged`.
TileCells cells_of(const CacheStoreView& store, const CacheShape& shape, const SequenceView& sequence, int64_t head,
                   int64_t tile, int64_t first, int64_t n_keys, uint8_t* staged, const Path* path = nullptr) {
    const KindShape kind = shape_of(store.kind);
    const auto cell = [&](int64_t key) {
        if (path) key = path->place(key);
        const int64_t row = sequence.blocks[key / shape.block_size] * store.n_rows + store.first_row + head;
        return (row * shape.n_tiles + tile) * shape.block_size + key % shape.block_size;
    };
    if (shape.block_size % kStretch == 0 && !(path && first + kStretch > path->base)) {
        const int64_t i = cell(first);
        return {store.codes + i * kind.code_bytes, store.high_bits ? store.high_bits + 4 * i : nullptr,
                store.scale ? store.scale + i : nullptr, store.minimum ? store.minimum + i : nullptr};
    }
    uint8_t* high_bits = staged + kStretch * 128;
    auto* scale = reinterpret_cast<uint16_t*>(high_bits + 4 * kStretch);
    uint16_t* minimum = scale + kStretch;
    std::memset(staged, 0, kStretch * (128 + 8));
    for (int64_t t = 0; t < kStretch && first + t < n_keys; t++) {
        const int64_t i = cell(first + t);
        std::memcpy(staged + t * kind.code_bytes, store.codes + i * kind.code_bytes, kind.code_bytes);
        if (kind.has_high_bits) std::memcpy(high_bits + 4 * t, store.high_bits + 4 * i, 4);
        if (kind.has_scale) scale[t] = store.scale[i];
        if (kind.has_minimum) minimum[t] = store.minimum[i];
    }
    return {staged, high_bits, scale, minimum};
}

// Prefetches: blocks of a head are far apart, and each is too short for the hardware prefetcher.
[[gnu::always_inline]] inline void fetch_stretch(const CacheStoreView& store, const CacheShape& shape, const Task& task, int64_t first, int64_t n_keys, uint8_t* staged) {
    if (first >= n_keys || shape.block_size % kStretch) return;
    const int64_t n_bytes = kStretch * shape_of(store.kind).code_bytes;
    for (int64_t tile = 0; tile < shape.n_tiles; tile++) {
        const TileCells cells = cells_of(store, shape, *task.sequence, task.head, tile, first, n_keys, staged);
        fetch(cells.codes, n_bytes);
        fetch(cells.scale, 1);  // a null address has no effect
        fetch(cells.minimum, 1);
        fetch(cells.high_bits, 1);
    }
}

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

// Some rows of a task, and the path of their token if they read on their own.
struct RowRange {
    int first, n;
    const Path* path = nullptr;
};

template <int MaxCode>
void score_code_rows(Scratch& s, const RowRange& rows, int64_t n_tiles, int stretch) {
    in_tiles<8>(rows.n, [&](auto count, int64_t r) { score_codes<count.value, MaxCode>(s, rows.first + r, n_tiles, stretch); });
}

template <int Rows>
void score_floats(Scratch& s, int row, int64_t dim, int stretch) {
    f32v score[Rows] = {};
    for (int64_t d = 0; d < dim; d++) {
        const f32v keys = load<f32v>(s.panel[d]);
#pragma GCC unroll 16
        for (int r = 0; r < Rows; r++) score[r] += keys * s.q[row + r][d];
    }
    for (int r = 0; r < Rows; r++) store(s.scores[row + r] + stretch * kStretch, score[r]);
}

void score_stretch(const AttentionArgs& a, const Task& task, int64_t first, int64_t n_keys, const RowRange& rows, int stretch, Scratch& s) {
    for (int64_t tile = 0; tile < a.shape.n_tiles; tile++) {
        const TileCells cells = cells_of(a.k, a.shape, *task.sequence, task.head, tile, first, n_keys, s.staged, rows.path);
        if (is_float_kind(a.k.kind))
            read_key_floats(a.k.kind, cells, s.panel + tile * kTile);
        else
            read_key_codes(a.k.kind, cells, s.key_codes[tile]);
    }
    if (is_float_kind(a.k.kind))
        in_tiles<12>(rows.n, [&](auto count, int64_t r) { score_floats<count.value>(s, rows.first + r, a.shape.dim, stretch); });
    else if (run_of(max_code_of(a.k.kind)) == 8)
        score_code_rows<15>(s, rows, a.shape.n_tiles, stretch);
    else if (run_of(max_code_of(a.k.kind)) == 4)
        score_code_rows<31>(s, rows, a.shape.n_tiles, stretch);
    else
        score_code_rows<kMaxFull>(s, rows, a.shape.n_tiles, stretch);
}

// Scores of a chunk → probabilities relative to the largest score so far.
void soften(Scratch& s, int row, int64_t first, int n_stretches) {
    f32v most = splat(s.largest[row]);
    for (int i = 0; i < n_stretches; i++) {
        const int64_t key = first + i * kStretch;
        f32v score = load<f32v>(s.scores[row] + i * kStretch);
        if (key < s.low[row] || key + kStretch - 1 > s.high[row]) {
            const i32v low = lane_numbers() < splat(static_cast<int32_t>(s.low[row] - key < kLanes ? s.low[row] - key : kLanes));
            const i32v high = lane_numbers() > splat(static_cast<int32_t>(s.high[row] - key > -1 ? s.high[row] - key : -1));
            score = (low | high) ? splat(-INFINITY) : score;
            store(s.scores[row] + i * kStretch, score);
        }
        most = score > most ? score : most;
    }
    const float largest = max_lanes(most);
    const float base = largest == -INFINITY ? 0.0f : largest;  // no visible key yet: e^-inf = 0, not NaN
    f32v total = {};
    for (int i = 0; i < n_stretches; i++) {
        const f32v p = vexp(load<f32v>(s.scores[row] + i * kStretch) - base);
        total += p;
        store(s.scores[row] + i * kStretch, p);
    }
    s.fade[row] = vexp(splat(s.largest[row] - base))[0];
    s.total[row] = s.total[row] * s.fade[row] + sum_lanes(total);
    s.largest[row] = largest;
}

// Adds the values of one half of a tile.
template <int Kind, int Rows>
void add_values(const TileCells cells[kStretches], int64_t tile, int half, int row, int64_t n_keys, Scratch& s) {
    f32v out[Rows][kValueVectors], taken[Rows] = {};
    const int64_t at = tile * kTile + half * 16;
    for (int r = 0; r < Rows; r++)
        for (int i = 0; i < kValueVectors; i++) out[r][i] = load<f32v>(s.out[row + r] + at + kLanes * i) * s.fade[row + r];
    for (int i = 0; i * kStretch < n_keys; i++) {
        const int n = n_keys - i * kStretch < kStretch ? static_cast<int>(n_keys - i * kStretch) : kStretch;
        alignas(64) float weights[Rows][kStretch];
        f32v scale, minimum;
        if constexpr (Kind > kCacheBF16) read_value_scales<Kind>(cells[i], scale, minimum);
        for (int r = 0; r < Rows; r++) {
            f32v p = load<f32v>(s.scores[row + r] + i * kStretch);
            if constexpr (Kind > kCacheBF16) {
                if (n < kStretch) p = lane_numbers() < splat(n) ? p : f32v{};
                if constexpr (Kind != kCacheQ8_0) {  // one product for both cases: two could be rounded in two ways
                    const f32v known = n < kStretch ? (p == 0.0f ? f32v{} : minimum) : minimum;
                    taken[r] += p * known;
                }
                p *= scale;
            }
            store(weights[r], p);
        }
        for (int t = 0; t < n; t++) {
            f32v v[kValueVectors];
            read_value<Kind>(cells[i], t, half, v);
#pragma GCC unroll 16
            for (int r = 0; r < Rows; r++)
                for (int k = 0; k < kValueVectors; k++) out[r][k] += v[k] * weights[r][t];
        }
    }
    for (int r = 0; r < Rows; r++) {
        const float less = sum_lanes(taken[r]);
        for (int i = 0; i < kValueVectors; i++) store(s.out[row + r] + at + kLanes * i, out[r][i] - less);
    }
}

template <int Kind>
void add_chunk(const AttentionArgs& a, const Task& task, int64_t first, int64_t stop, int64_t n_keys, const RowRange& rows, Scratch& s) {
    alignas(64) uint8_t staged[kStretches][sizeof s.staged];
    for (int64_t tile = 0; tile < a.shape.n_tiles; tile++) {
        TileCells cells[kStretches];
        for (int i = 0; first + i * kStretch < stop; i++)
            cells[i] = cells_of(a.v, a.shape, *task.sequence, task.head, tile, first + i * kStretch, n_keys, staged[i], rows.path);
        for (int half = 0; half < 2; half++)
            in_tiles<kValueRows>(rows.n, [&](auto count, int64_t r) { add_values<Kind, count.value>(cells, tile, half, rows.first + r, stop - first, s); });
    }
}

void add_chunk(const AttentionArgs& a, const Task& task, int64_t first, int64_t stop, int64_t n_keys, const RowRange& rows, Scratch& s) {
    switch (a.v.kind) {
        case kCacheF32: return add_chunk<kCacheF32>(a, task, first, stop, n_keys, rows, s);
        case kCacheF16: return add_chunk<kCacheF16>(a, task, first, stop, n_keys, rows, s);
        case kCacheBF16: return add_chunk<kCacheBF16>(a, task, first, stop, n_keys, rows, s);
        case kCacheQ8_0: return add_chunk<kCacheQ8_0>(a, task, first, stop, n_keys, rows, s);
        case kCacheQ5_1: return add_chunk<kCacheQ5_1>(a, task, first, stop, n_keys, rows, s);
        case kCacheQ5_0: return add_chunk<kCacheQ5_0>(a, task, first, stop, n_keys, rows, s);
        case kCacheQ4_1: return add_chunk<kCacheQ4_1>(a, task, first, stop, n_keys, rows, s);
        case kCacheQ4_0: return add_chunk<kCacheQ4_0>(a, task, first, stop, n_keys, rows, s);
        case kCacheIQ4_NL: return add_chunk<kCacheIQ4_NL>(a, task, first, stop, n_keys, rows, s);
    }
}

// Adds the keys `start` … `end` - 1 of `n_keys` to some rows; `start` is a multiple of kChunk.
void attend_keys(const AttentionArgs& a, const Task& task, int64_t start, int64_t end, int64_t n_keys, const RowRange& rows, Scratch& s) {
    for (int64_t first = start; first < end; first += kChunk) {
        const int64_t stop = n_keys - first < kChunk ? n_keys : first + kChunk;
        const int n_stretches = static_cast<int>((stop - first + kStretch - 1) / kStretch);
        for (int i = 0; i < n_stretches; i++) {
            if (!rows.path) fetch_stretch(a.v, a.shape, task, first + i * kStretch, n_keys, s.staged);
            score_stretch(a, task, first + i * kStretch, n_keys, rows, i, s);
        }
        if (!rows.path)
            for (int i = 0; i < kStretches; i++) fetch_stretch(a.k, a.shape, task, stop + i * kStretch, n_keys, s.staged);
        for (int r = 0; r < rows.n; r++) soften(s, rows.first + r, first, n_stretches);
        add_chunk(a, task, first, stop, n_keys, rows, s);
    }
}

void attend(const AttentionArgs& a, const Cut& cut, const Task& task, Scratch& s) {
    const int n_rows = static_cast<int>(task.n_tokens * cut.group);
    const SequenceView& sequence = *task.sequence;
    read_queries(a, cut, task, n_rows, s);
    int64_t n_keys = s.high[n_rows - 1] + 1, lowest = s.low[0];  // up to the last row's own key
    for (int r = 0; sequence.seen && r < n_rows; r++) {  // in a tree, a later row may be less deep
        n_keys = s.high[r] + 1 > n_keys ? s.high[r] + 1 : n_keys;
        lowest = s.low[r] < lowest ? s.low[r] : lowest;
    }
    const int64_t low = lowest / kChunk * kChunk;
    const int64_t n_chunks = (n_keys - low + kChunk - 1) / kChunk;
    const int64_t start = low + n_chunks * task.split / cut.n_splits * kChunk;
    const int64_t end = low + n_chunks * (task.split + 1) / cut.n_splits * kChunk;
    if (!sequence.seen) return attend_keys(a, task, start, end, n_keys, {0, n_rows}, s);
    const int64_t base = sequence.position - sequence.first, own = base / kChunk * kChunk;  // the chunk of the tree's first key
    attend_keys(a, task, start, end < own ? end : own, base, {0, n_rows}, s);
    for (int64_t t = 0; t < task.n_tokens; t++) {
        const int row = static_cast<int>(t * cut.group);
        const Path path(sequence, task.first_token + t);
        const int64_t n_own = s.high[row] + 1;
        attend_keys(a, task, start < own ? own : start, end < n_own ? end : n_own, n_own, {row, static_cast<int>(cut.group), &path}, s);
    }
}

// The sum of a head's probabilities, relative to the largest score, with its sink.
float with_sink(const AttentionArgs& a, int64_t row, float largest, float total) {
    return a.sinks ? total + std::exp(a.sinks[row % a.n_heads] - largest) : total;
}

// Stores x / total, rotated back.
void write_row(const AttentionArgs& a, float* x, float total, float* out) {
    for (int64_t d = 0; d < a.shape.dim; d++) x[d] /= total;
    if (a.out_rotation) hadamard_stretches(x, a.shape.dim, a.out_rotation);
    std::memcpy(out, x, a.shape.dim * sizeof(float));
}

}  // namespace

void attention(const AttentionArgs& a, const Worker& worker) {
    auto& s = *reinterpret_cast<Scratch*>(worker.scratch);
    if (!a.n_heads || !a.n_tokens) return;
    const Cut cut = cut_work(a);
    for (int64_t i; (i = worker.take()) < cut.n_tasks * cut.n_splits;) {
        const Task task = find_task(a, cut, i);
        attend(a, cut, task, s);
        for (int r = 0; r < task.n_tokens * cut.group; r++) {
            const int64_t at = (query_of(a, cut, task, r) - a.q) / a.shape.dim;  // (token, head) as one number
            if (cut.n_splits == 1) {
                write_row(a, s.out[r], with_sink(a, at, s.largest[r], s.total[r]), a.out + at * a.shape.dim);
            } else {
                float* partial = a.partial + (at * cut.n_splits + task.split) * (a.shape.dim + 2);
                partial[0] = s.largest[r];
                partial[1] = s.total[r];
                std::memcpy(partial + 2, s.out[r], a.shape.dim * sizeof(float));
            }
        }
    }
}

void attention_join(const AttentionArgs& a, const Worker& worker) {
    if (!a.n_heads || !a.n_tokens) return;
    const Cut cut = cut_work(a);
    if (cut.n_splits == 1) return;
    float* sum = reinterpret_cast<float*>(worker.scratch);
    const int64_t dim = a.shape.dim, stride = dim + 2;
    for (int64_t row; (row = worker.take()) < a.n_tokens * a.n_heads;) {
        const float* parts = a.partial + row * cut.n_splits * stride;
        float largest = -INFINITY, total = 0;
        for (int i = 0; i < cut.n_splits; i++) largest = parts[i * stride] > largest ? parts[i * stride] : largest;
        std::memset(sum, 0, dim * sizeof(float));
        for (int i = 0; i < cut.n_splits; i++) {
            const float* part = parts + i * stride;
            if (part[1] == 0) continue;
            const float factor = std::exp(part[0] - largest);
            total += factor * part[1];
            for (int64_t d = 0; d < dim; d++) sum[d] += factor * part[2 + d];
        }
        write_row(a, sum, with_sink(a, row, largest, total), a.out + row * dim);
    }
}

}  // namespace motley::MOTLEY_ISA
