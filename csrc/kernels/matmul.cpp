// out = x · Wᵀ for weights of any format (formats.hpp): one token by matvec.hpp, more by panels and tiles.
//
// A task is two groups of rows (two neighbours, or the gate's and its partner's) for a block of tokens. Its weights
// are decoded 512 columns at a time into panels that stay in the first-level cache, and each panel is used for all
// tokens of the block; so the inner loops (tile.hpp) have only two kinds of weights, codes and floats.
#include "finish.hpp"
#include "matvec.hpp"
#include "tile.hpp"

namespace motley::MOTLEY_ISA {
namespace {

constexpr int64_t kMaxBlockTokens = 512;
constexpr int64_t kBlockBytes = 1 << 20;  // of activations: half of a second-level cache

struct Pair {  // two groups: their parts and group numbers
    const MatMulPart* part[2];
    int64_t group[2];
    bool has_second;
};

int64_t n_groups(const MatMulPart& part) { return (part.n_rows + kGroup - 1) / kGroup; }

bool is_gated(const MatMulArgs& a) { return a.gate != kNoFunction; }

int64_t count_pairs(const MatMulArgs& a) {
    if (is_gated(a)) return n_groups(a.parts[0]);
    int64_t n = 0;
    for (int p = 0; p < a.n_parts; p++) n += (n_groups(a.parts[p]) + 1) / 2;
    return n;
}

Pair find_pair(const MatMulArgs& a, int64_t i) {
    if (is_gated(a)) return {{&a.parts[0], &a.parts[1]}, {i, i}, true};
    int p = 0;
    for (; i >= (n_groups(a.parts[p]) + 1) / 2; p++) i -= (n_groups(a.parts[p]) + 1) / 2;
    const bool has_second = 2 * i + 1 < n_groups(a.parts[p]);
    return {{&a.parts[p], &a.parts[p]}, {2 * i, 2 * i + has_second}, has_second};
}

struct Scratch {
    union {
        CodePanel codes[2];
        FloatPanel floats[2];
    };
    alignas(64) float out[2][kMaxBlockTokens][kGroup];
};
static_assert(sizeof(Scratch) <= kScratchBytes);

bool uses_codes(const MatMulArgs& a, const MatMulPart& part) { return !a.is_exact && !is_plain(part.format); }

template <int Halves, int MaxCode>
void multiply_codes(const MatMulArgs& a, Scratch& scratch, const Rows& x, int64_t n_tokens, int64_t first, int64_t n) {
    const CodePanel* const panels[2] = {&scratch.codes[0], &scratch.codes[1]};
    float* const out[2] = {scratch.out[0][0], scratch.out[1][0]};
    in_tiles<kTileTokens>(n_tokens, [&](auto count, int64_t token) {
        tile_codes<count.value, Halves, MaxCode>(panels, x, a.n_columns, token, first, n, out);
    });
}

// Calls `visit` with the class of codes up to max_code; each class is multiplied in a different way.
template <class Visit>
void with_max_code(int max_code, Visit&& visit) {
    switch (run_of(max_code)) {
        case 8: return visit(Count<15>{});
        case 4: return visit(Count<31>{});
        case 2: return visit(Count<63>{});
        default: return visit(Count<kMaxFull>{});
    }
}

void multiply_floats(Scratch& scratch, const Rows& x, int64_t n_tokens, int64_t first, int64_t n) {
    const FloatPanel* const panels[2] = {&scratch.floats[0], &scratch.floats[1]};
    float* const out[2] = {scratch.out[0][0], scratch.out[1][0]};
    in_tiles<kFloatTokens>(n_tokens, [&](auto count, int64_t token) {
        tile_floats<count.value>(panels, x, token, first, n, out);
    });
}

Rows rows_from(const Rows& x, int64_t token, int64_t n_columns) {
    const int64_t n_steps = n_columns / kStep;
    Rows rows = x;
    rows.values += token * x.stride;
    if (x.codes) {
        rows.codes += token * n_columns;
        rows.scales += token * n_steps;
        rows.sums += token * n_steps;
        rows.half_sums += token * n_steps * 2;
    }
    return rows;
}

// Columns first … first + n of a group as codes, with `halves` scales a step. `cuts`: full codes are cut (panel.hpp).
void decode_part(const MatMulPart& part, const uint8_t* group, int64_t n_columns, int64_t first, int64_t n, int halves, bool cuts,
                 CodePanel& panel) {
    int own_halves = 1;
    if (is_rows(part.format))
        decode_row_codes(group, group_bytes(part.format, n_columns) / kGroup, first, n, panel);
    else
        with_quantized(part.format, [&](auto f) {
            own_halves = f.kHalves;
            decode_codes<decltype(f)>(group, first, n, cuts, panel);
        });
    if (halves > own_halves) repeat_halves(panel);
}

void multiply_pair(const MatMulArgs& a, const Pair& pair, int64_t token, int64_t n_tokens, Scratch& scratch) {
    const Rows x = rows_from(a.x, token, a.n_columns);
    const uint8_t* group[2];
    for (int i = 0; i < 2; i++) {
        group[i] = pair.part[i]->weight + pair.group[i] * group_bytes(pair.part[i]->format, a.n_columns);
        std::memset(scratch.out[i], 0, n_tokens * kGroup * sizeof(float));
    }
    int halves = 1, max_code = 0;
    const bool codes = uses_codes(a, *pair.part[0]) && uses_codes(a, *pair.part[1]);
    for (const MatMulPart* part : pair.part) {
        if (is_rows(part->format)) max_code = kMaxFull;
        with_quantized(part->format, [&](auto f) {
            halves = f.kHalves > halves ? f.kHalves : halves;
            max_code = f.kMaxCode > max_code ? f.kMaxCode : max_code;
        });
    }
    for (int64_t first = 0; first < a.n_columns; first += kPanelColumns) {
        const int64_t n = a.n_columns - first < kPanelColumns ? a.n_columns - first : kPanelColumns;
        if (!codes) {
            for (int i = 0; i < 2; i++) {
                const int format = pair.part[i]->format;
                if (is_rows(format))
                    decode_row_floats(group[i], group_bytes(format, a.n_columns) / kGroup, first, n, scratch.floats[i]);
                else
                    decode_floats(format, group[i], first, n, scratch.floats[i]);
            }
            multiply_floats(scratch, x, n_tokens, first, n);
            continue;
        }
        for (int i = 0; i < 2; i++)
            decode_part(*pair.part[i], group[i], a.n_columns, first, n, halves, kCutsFull && max_code == kMaxFull, scratch.codes[i]);
        with_max_code(max_code, [&](auto most) {
            if (halves == 2)
                multiply_codes<2, most.value>(a, scratch, x, n_tokens, first, n);
            else
                multiply_codes<1, most.value>(a, scratch, x, n_tokens, first, n);
        });
    }
    for (int64_t t = 0; t < n_tokens; t++) {
        const f32v y0 = load<f32v>(scratch.out[0][t]), y1 = load<f32v>(scratch.out[1][t]);
        if (is_gated(a)) {
            finish_gated(a.parts[0], a.parts[1], a.gate, token + t, pair.group[0], y0, y1);
        } else {
            finish(*pair.part[0], token + t, pair.group[0], y0);
            if (pair.has_second) finish(*pair.part[1], token + t, pair.group[1], y1);
        }
    }
}

void multiply_tokens(const MatMulArgs& a, const Worker& worker) {
    auto& scratch = *reinterpret_cast<Scratch*>(worker.scratch);
    int64_t block = kBlockBytes / (a.n_columns ? a.n_columns : 1) / kTileTokens * kTileTokens;
    block = block < 16 * kTileTokens ? 16 * kTileTokens : (block > kMaxBlockTokens ? kMaxBlockTokens : block);
    const int64_t n_blocks = (a.n_tokens + block - 1) / block, n_pairs = count_pairs(a);
    for (int64_t task; (task = worker.take()) < n_blocks * n_pairs;) {
        const int64_t token = task / n_pairs * block;
        const int64_t n_tokens = a.n_tokens - token < block ? a.n_tokens - token : block;
        multiply_pair(a, find_pair(a, task % n_pairs), token, n_tokens, scratch);
    }
}

// The division of all parts' groups, one part after the other, into pieces for threads: each round has one piece per
// thread, first large pieces (long contiguous reads are fastest), then smaller ones (so that all threads end together).
class Pieces {
public:
    struct Piece {
        int64_t first, n;  // n is 0 after the last piece
    };

    Pieces(int64_t n_groups, int64_t min_groups, int n_threads, int first_share)
        : n_groups_(n_groups), min_groups_(min_groups), n_threads_(n_threads), first_share_(first_share) {}

    Piece at(int64_t i) const {
        int64_t first = 0;
        for (; first < n_groups_; i -= n_threads_) {
            const int64_t share = (n_groups_ - first) * first_share_ / (100 * n_threads_);
            const int64_t n = share < min_groups_ ? min_groups_ : share;
            if (i >= n_threads_) {
                first += n * n_threads_;
                continue;
            }
            first += n * i;
            const int64_t left = n_groups_ - first;
            return {first, left < 0 ? 0 : (left < n ? left : n)};
        }
        return {n_groups_, 0};
    }

private:
    const int64_t n_groups_, min_groups_;
    const int n_threads_, first_share_;
};

constexpr int64_t kMinPieceBytes = 32 << 10;

// y[i] = group first + i of one part, for n of them.
void multiply_groups(const MatMulArgs& a, const MatMulPart& part, int64_t first, int64_t n, f32v* y) {
    for (int64_t i = 0; i < n; i += part.pattern.streams) {
        const int64_t left = n - i;
        matvec(part, first + i, left < part.pattern.streams ? static_cast<int>(left) : part.pattern.streams, a.x, a.n_columns, y + i);
    }
}

// Number of groups whose results are kept in scratch memory until bias, residual or gate are applied. A gate and its
// partner alternate only after this many groups, so that both are read in long contiguous pieces.
constexpr int64_t kMaxWaiting = 512;
static_assert(2 * kMaxWaiting * sizeof(f32v) <= kScratchBytes);

// Computes groups first … first + n of one part, or of a gate and its partner.
void finish_groups(const MatMulArgs& a, const MatMulPart& part, int64_t first, int64_t n, const Worker& worker) {
    auto* const y = reinterpret_cast<f32v*>(worker.scratch);
    auto* const other = y + kMaxWaiting;
    for (int64_t stop = first + n; first < stop; first += kMaxWaiting) {
        const int64_t count = stop - first < kMaxWaiting ? stop - first : kMaxWaiting;
        multiply_groups(a, part, first, count, y);
        if (is_gated(a)) multiply_groups(a, a.parts[1], first, count, other);
        for (int64_t i = 0; i < count; i++) {
            if (is_gated(a))
                finish_gated(part, a.parts[1], a.gate, 0, first + i, y[i], other[i]);
            else
                finish(part, 0, first + i, y[i]);
        }
    }
}

void multiply_one(const MatMulArgs& a, const Worker& worker) {
    const int n_parts = is_gated(a) ? 1 : a.n_parts;
    int64_t n_all = 0;
    for (int p = 0; p < n_parts; p++) n_all += n_groups(a.parts[p]);
    const ReadPattern& pattern = a.parts[0].pattern;
    const int64_t bytes = group_bytes(a.parts[0].format, a.n_columns) * (is_gated(a) ? 2 : 1) + 1;
    const int64_t enough = (kMinPieceBytes / bytes + pattern.streams) / pattern.streams * pattern.streams;
    const Pieces pieces(n_all, enough, worker.n_threads, pattern.first_share);
    for (Pieces::Piece piece; (piece = pieces.at(worker.take())).n;) {
        int64_t begin = 0;  // first group of the part
        for (int p = 0; p < n_parts; p++) {
            const int64_t end = begin + n_groups(a.parts[p]), stop = piece.first + piece.n;
            const int64_t from = piece.first > begin ? piece.first : begin, to = stop < end ? stop : end;
            if (from < to) finish_groups(a, a.parts[p], from - begin, to - from, worker);
            begin = end;
        }
    }
}

}  // namespace

void matmul(const MatMulArgs& a, const Worker& worker) {
    bool is_simple = a.n_tokens == 1;
    for (int p = 0; p < a.n_parts; p++) is_simple = is_simple && (is_plain(a.parts[p].format) || !a.is_exact);
    if (is_simple)
        multiply_one(a, worker);
    else
        multiply_tokens(a, worker);
}

}  // namespace motley::MOTLEY_ISA
