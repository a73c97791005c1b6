// out = x · Wᵀ for weights of any format (formats.hpp): a few tokens by matvec.hpp, more by panels and tiles.
//
// With many tokens, a task is two groups of rows (two neighbours, or the gate's and its partner's) for a block of tokens. Its weights
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
    alignas(64) float unused[kMaxBlockTokens][kGroup];
};
static_assert(sizeof(Scratch) <= kScratchBytes);

bool uses_codes(const MatMulArgs& a, const MatMulPart& part) { return !a.is_exact && !is_plain(part.format); }

// The panels and results of two groups.
struct PanelPair {
    const CodePanel* panels[2];
    float* out[2];
};

template <int Halves, int MaxCode, bool HasMinimum>
void multiply_codes(const MatMulArgs& a, const PanelPair& pair, const Rows& x, int64_t n_tokens, int64_t first, int64_t n) {
    in_tiles<kTileTokens>(n_tokens, [&](auto count, int64_t token) {
        tile_codes<count.value, Halves, MaxCode, HasMinimum>(pair.panels, x, a.n_columns, token, first, n, pair.out);
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
        rows.code_sums += token * n_steps * 2;
    }
    return rows;
}

// The number of scales that a step of the format has, its largest code, and whether it has minima.
struct CodeShape {
    int halves = 1, max_code = kMaxFull;
    bool has_minimum = true;
};

CodeShape code_shape(int format) {
    CodeShape shape;
    with_quantized(is_rows(format) ? static_cast<int>(kQ8_0) : format, [&](auto f) { shape = {f.kHalves, f.kMaxCode, f.kHasMinimum}; });
    return shape;
}

// Columns first … first + n of a group as codes. `cuts`: full codes are cut (panel.hpp).
void decode_part(const MatMulPart& part, const uint8_t* group, int64_t n_columns, int64_t first, int64_t n, bool cuts, CodePanel& panel) {
    if (is_rows(part.format))
        decode_row_codes(group, group_bytes(part.format, n_columns) / kGroup, first, n, panel);
    else
        with_quantized(part.format, [&](auto f) { decode_codes<decltype(f)>(group, first, n, cuts, panel); });
}

// Adds n columns of both groups, which are in scratch.codes.
void multiply_panels(const MatMulArgs& a, const CodeShape shapes[2], Scratch& scratch, const Rows& x, int64_t n_tokens, int64_t first, int64_t n) {
    const auto multiply = [&](const PanelPair& pair, int halves) {
        const int max_code = shapes[0].max_code > shapes[1].max_code ? shapes[0].max_code : shapes[1].max_code;
        with_max_code(max_code, [&](auto most) {
            if (halves == 2) return multiply_codes<2, most.value, true>(a, pair, x, n_tokens, first, n);
            if constexpr (most.value == kMaxFull && kFullIsSigned)
                if (!shapes[0].has_minimum && !shapes[1].has_minimum) return multiply_codes<1, most.value, false>(a, pair, x, n_tokens, first, n);
            multiply_codes<1, most.value, true>(a, pair, x, n_tokens, first, n);
        });
    };
    const CodePanel* const panels = scratch.codes;
    if (shapes[0].halves == shapes[1].halves) return multiply({{&panels[0], &panels[1]}, {scratch.out[0][0], scratch.out[1][0]}}, shapes[0].halves);
    for (int i = 0; i < 2; i++)  // a gate and its partner in different formats, which is rare: one after the other
        multiply({{&panels[i], &panels[i]}, {scratch.out[i][0], scratch.unused[0]}}, shapes[i].halves);
}

void multiply_pair(const MatMulArgs& a, const Pair& pair, int64_t token, int64_t n_tokens, Scratch& scratch) {
    const Rows x = rows_from(a.x, token, a.n_columns);
    const uint8_t* group[2];
    for (int i = 0; i < 2; i++) {
        group[i] = pair.part[i]->weight + pair.group[i] * group_bytes(pair.part[i]->format, a.n_columns);
        std::memset(scratch.out[i], 0, n_tokens * kGroup * sizeof(float));
    }
    const bool codes = uses_codes(a, *pair.part[0]) && uses_codes(a, *pair.part[1]);
    const CodeShape shapes[2] = {code_shape(pair.part[0]->format), code_shape(pair.part[1]->format)};
    const bool cuts = kCutsFull && (shapes[0].max_code == kMaxFull || shapes[1].max_code == kMaxFull);
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
        for (int i = 0; i < 2; i++) decode_part(*pair.part[i], group[i], a.n_columns, first, n, cuts, scratch.codes[i]);
        multiply_panels(a, shapes, scratch, x, n_tokens, first, n);
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

// Tokens of a product by matvec.hpp. More of them cost less by tiles.
constexpr int64_t kMaxFew = kVectorBytes == 64 ? 32 : 16, kMaxFewPlain = kVectorBytes == 64 ? 32 : 8;

// Results that are kept in scratch memory until bias, residual or gate are applied: of this many groups, of one token. A
// gate and its partner alternate only after them, so that both are read in long contiguous pieces.
constexpr int64_t kMaxWaiting = 512;
constexpr int64_t kWaitingBytes = 2 * kMaxWaiting * sizeof(f32v);

// The batch's tokens in blocks of up to kFewTokens, interleaved in a worker's scratch memory.
class FewBlocks {
public:
    struct Block {
        FewRows x;
        int64_t first, n;  // tokens
    };

    FewBlocks(const MatMulArgs& a, uint8_t* memory) : n_tokens_(a.n_tokens), matvec_scratch_(memory) {
        const bool has_values = needs_values(a), has_codes = needs_codes(a);
        memory += matvec_scratch_bytes(a);
        if (n_tokens_ == 1) {
            blocks_[n_++] = {{a.x.values, a.x.codes, a.x.scales, a.x.sums, a.x.half_sums}, 0, 1};
            return;
        }
        for (int64_t first = 0; first < n_tokens_; first += size(n_tokens_)) {
            const int64_t left = n_tokens_ - first, n = left < size(n_tokens_) ? left : size(n_tokens_);
            blocks_[n_++] = {interleave_tokens(a.x, first, n, a.n_columns, has_values, has_codes, memory), first, n};
            memory += few_bytes(n, a.n_columns, has_values, has_codes) / 64 * 64;
        }
    }

    const Block* begin() const { return blocks_; }
    const Block* end() const { return blocks_ + n_; }
    int64_t n_tokens() const { return n_tokens_; }
    uint8_t* matvec_scratch() const { return matvec_scratch_; }

    static bool fit(const MatMulArgs& a) {
        if (a.n_tokens < 1 || a.n_tokens > (needs_values(a) ? kMaxFewPlain : kMaxFew)) return false;
        const int64_t bytes = few_bytes(kFewTokens, a.n_columns, needs_values(a), needs_codes(a));
        return a.n_tokens == 1 || bytes * ((a.n_tokens + kFewTokens - 1) / kFewTokens) <= kScratchBytes - kWaitingBytes - matvec_scratch_bytes(a);
    }

private:
    static int64_t size(int64_t n_tokens) {  // blocks of about the same size
        const int64_t n_blocks = (n_tokens + kFewTokens - 1) / kFewTokens;
        return (n_tokens + n_blocks - 1) / n_blocks;
    }
    static bool needs_values(const MatMulArgs& a) { return has_part(a, [](int format) { return is_plain(format); }); }
    static int64_t matvec_scratch_bytes(const MatMulArgs& a) { return has_part(a, is_rows) ? kMatvecScratchBytes : 0; }
    static bool needs_codes(const MatMulArgs& a) { return has_part(a, [](int format) { return !is_plain(format); }); }
    template <class Predicate>
    static bool has_part(const MatMulArgs& a, Predicate&& predicate) {
        bool found = false;
        for (int p = 0; p < a.n_parts; p++) found = found || predicate(a.parts[p].format);
        return found;
    }

    const int64_t n_tokens_;
    uint8_t* const matvec_scratch_;
    Block blocks_[kMaxFew];
    int n_ = 0;
};

// y (token, group) = groups first … first + n of one part.
void multiply_groups(const MatMulArgs& a, const MatMulPart& part, int64_t first, int64_t n, const FewBlocks& blocks, f32v* y) {
    const bool is_row_by_row = is_rows(part.format) && blocks.n_tokens() == 1;  // one stream, whatever the number of groups
    const int64_t n_streams = is_row_by_row ? n : part.pattern.streams;
    f32v results[kMaxStreams * kFewTokens];  // (group, token)
    for (int64_t i = 0; i < n; i += n_streams) {
        const int count = static_cast<int>(n - i < n_streams ? n - i : n_streams);
        if (blocks.n_tokens() == 1) {
            matvec<1>(part, first + i, count, blocks.begin()->x, a.n_columns, blocks.matvec_scratch(), y + i);
            continue;
        }
        for (const FewBlocks::Block& block : blocks)
            with_few_tokens(block.n, [&](auto tokens) {
                matvec<tokens.value>(part, first + i, count, block.x, a.n_columns, blocks.matvec_scratch(), results);
                for (int64_t t = 0; t < block.n; t++)
                    for (int k = 0; k < count; k++) y[(block.first + t) * n + i + k] = results[k * tokens.value + t];
            });
    }
}

// Computes groups first … first + n of one part, or of a gate and its partner.
void finish_groups(const MatMulArgs& a, const MatMulPart& part, int64_t first, int64_t n, const FewBlocks& blocks, f32v* y) {
    const int64_t n_waiting = kMaxWaiting / blocks.n_tokens();
    auto* const other = y + kMaxWaiting;
    for (int64_t stop = first + n; first < stop; first += n_waiting) {
        const int64_t count = stop - first < n_waiting ? stop - first : n_waiting;
        multiply_groups(a, part, first, count, blocks, y);
        if (is_gated(a)) multiply_groups(a, a.parts[1], first, count, blocks, other);
        for (int64_t t = 0; t < blocks.n_tokens(); t++)
            for (int64_t i = 0; i < count; i++) {
                if (is_gated(a))
                    finish_gated(part, a.parts[1], a.gate, t, first + i, y[t * count + i], other[t * count + i]);
                else
                    finish(part, t, first + i, y[t * count + i]);
            }
    }
}

void multiply_few(const MatMulArgs& a, const Worker& worker) {
    const int n_parts = is_gated(a) ? 1 : a.n_parts;
    int64_t n_all = 0;
    for (int p = 0; p < n_parts; p++) n_all += n_groups(a.parts[p]);
    const ReadPattern& pattern = a.parts[0].pattern;
    const int64_t bytes = group_bytes(a.parts[0].format, a.n_columns) * (is_gated(a) ? 2 : 1) + 1;
    const int64_t enough = (kMinPieceBytes / bytes + pattern.streams) / pattern.streams * pattern.streams;
    const Pieces pieces(n_all, enough, worker.n_threads, pattern.first_share);
    Pieces::Piece piece = pieces.at(worker.take());
    if (!piece.n) return;
    const FewBlocks blocks(a, worker.scratch + kWaitingBytes);
    for (; piece.n; piece = pieces.at(worker.take())) {
        int64_t begin = 0;  // first group of the part
        for (int p = 0; p < n_parts; p++) {
            const int64_t end = begin + n_groups(a.parts[p]), stop = piece.first + piece.n;
            const int64_t from = piece.first > begin ? piece.first : begin, to = stop < end ? stop : end;
            if (from < to) finish_groups(a, a.parts[p], from - begin, to - from, blocks, reinterpret_cast<f32v*>(worker.scratch));
            begin = end;
        }
    }
}

}  // namespace

void matmul(const MatMulArgs& a, const Worker& worker) {
    bool is_few = FewBlocks::fit(a);
    for (int p = 0; p < a.n_parts; p++) is_few = is_few && (is_plain(a.parts[p].format) || !a.is_exact);
    if (is_few)
        multiply_few(a, worker);
    else
        multiply_tokens(a, worker);
}

}  // namespace motley::MOTLEY_ISA
