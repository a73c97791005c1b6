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
#include "attention_chunk.hpp"
#include "hadamard.hpp"
#include "quantize.hpp"

namespace motley::MOTLEY_ISA {
namespace {

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
void read_queries(const AttentionArgs& a, const Cut& cut, const Task& task, int n_rows, AttentionScratch& s) {
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

// The memory of segment i of a row in split attention: `row` is (token, head) as one number, the row's first segment is 0.
float* partial_segment(const AttentionArgs& a, int64_t row, int64_t i) {
    return a.partial + (row * kMaxSegments + i) * (a.shape.dim + 2);
}

// Ends a row's segment: merges it with those before it, or stores it for attention_join.
void end_segment(const AttentionArgs& a, const Cut& cut, const Task& task, int row, AttentionScratch& s) {
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
void enter_segment(const AttentionArgs& a, const Cut& cut, const Task& task, int64_t first, const RowRange& rows, AttentionScratch& s) {
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
                  int64_t n_keys, AttentionScratch& s) {
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
void attend_keys(const AttentionArgs& a, const Cut& cut, const Task& task, const KeyRange& keys, int first, int n, const Path* path, AttentionScratch& s) {
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

void attend(const AttentionArgs& a, const Cut& cut, const Task& task, AttentionScratch& s) {
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
    auto& s = *reinterpret_cast<AttentionScratch*>(worker.scratch);
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
