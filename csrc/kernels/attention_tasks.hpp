// How attention is divided: the keys that each row sees, tasks of rows, and the path to a row of a tree (see attention.cpp).
#pragma once
#include "../kernels.hpp"
#include "simd.hpp"

namespace motley::MOTLEY_ISA {

constexpr int kMaxRows = kMaxQueryGroup;  // of a task
constexpr int kChunk = 128;          // keys
constexpr int kMaxSegments = 16;     // of a row
constexpr int kMinSegmentLog2 = 8;   // keys, a multiple of kChunk
static_assert((1 << kMinSegmentLog2) % kChunk == 0);

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

inline int64_t count_tasks(const AttentionArgs& a, const Cut& cut) {
    int64_t n = 0;
    for (int64_t i = 0; i < a.batch->n_sequences; i++)
        if (a.batch->sequences[i].n_tokens) n += SequenceTasks(a.batch->sequences[i], a, cut).n();
    return n;
}

// As few tasks as give each thread about four: first keys are split, as parts of them are contiguous, then heads.
inline Cut cut_work(const AttentionArgs& a) {
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

inline Task find_task(const AttentionArgs& a, const Cut& cut, int64_t i) {
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
inline int64_t rows_per_head(const Cut& cut, const Task& task) { return task.n_tokens * cut.group; }

inline int64_t token_of(const Cut& cut, const Task& task, int64_t row) { return task.first_token + row % rows_per_head(cut, task) / cut.group; }

// A task's row as one number of (token, head).
inline int64_t row_number(const AttentionArgs& a, const Cut& cut, const Task& task, int64_t row) {
    const int64_t head = task.first_head + row / rows_per_head(cut, task);
    return (task.sequence->first_token + token_of(cut, task, row)) * a.n_heads + head * cut.group + row % cut.group;
}

}  // namespace motley::MOTLEY_ISA
