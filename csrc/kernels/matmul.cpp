// out = x · Wᵀ for weights of any format (formats.hpp): one token by matvec.hpp, more by panels and tiles.
//
// A task is two groups of 16 rows (two neighbours, or the gate's and its partner's) for a block of tokens. Its weights
// are decoded 512 columns at a time into panels that stay in the first-level cache, and each panel is used for all
// tokens of the block; so the inner loops (tile.hpp) know two kinds of weights only, codes and floats.
#include "finish.hpp"
#include "matvec.hpp"
#include "tile.hpp"

namespace motley::MOTLEY_ISA {
namespace {

constexpr int64_t kMaxBlockTokens = 512;
constexpr int64_t kBlockBytes = 1 << 20;  // of activations: half of a second-level cache

struct Pair {  // of groups: parts and their group numbers
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

template <int Halves>
void multiply_codes(const MatMulArgs& a, Scratch& scratch, const Rows& x, int64_t n_tokens, int64_t first, int64_t n) {
    const CodePanel* const panels[2] = {&scratch.codes[0], &scratch.codes[1]};
    float* const out[2] = {scratch.out[0][0], scratch.out[1][0]};
    in_tiles<kTileTokens>(n_tokens, [&](auto count, int64_t token) {
        tile_codes<count.value, Halves>(panels, x, a.n_columns, token, first, n, out);
    });
}

void multiply_floats(Scratch& scratch, const Rows& x, int64_t n_tokens, int64_t first, int64_t n) {
    const FloatPanel* const panels[2] = {&scratch.floats[0], &scratch.floats[1]};
    float* const out[2] = {scratch.out[0][0], scratch.out[1][0]};
    in_tiles<2 * kTileTokens>(n_tokens, [&](auto count, int64_t token) {
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

void multiply_pair(const MatMulArgs& a, const Pair& pair, int64_t token, int64_t n_tokens, Scratch& scratch) {
    const Rows x = rows_from(a.x, token, a.n_columns);
    const uint8_t* group[2];
    for (int i = 0; i < 2; i++) {
        group[i] = pair.part[i]->weight + pair.group[i] * group_bytes(pair.part[i]->format, a.n_columns);
        std::memset(scratch.out[i], 0, n_tokens * kGroup * sizeof(float));
    }
    int halves[2] = {1, 1};
    const bool codes = uses_codes(a, *pair.part[0]) && uses_codes(a, *pair.part[1]);
    for (int64_t first = 0; first < a.n_columns; first += kPanelColumns) {
        const int64_t n = a.n_columns - first < kPanelColumns ? a.n_columns - first : kPanelColumns;
        if (!codes) {
            for (int i = 0; i < 2; i++) decode_floats(pair.part[i]->format, group[i], first, n, scratch.floats[i]);
            multiply_floats(scratch, x, n_tokens, first, n);
            continue;
        }
        for (int i = 0; i < 2; i++)
            with_quantized(pair.part[i]->format, [&](auto f) {
                halves[i] = f.kHalves;
                decode_codes<decltype(f)>(group[i], first, n, scratch.codes[i]);
            });
        if (halves[0] == 2 || halves[1] == 2) {
            for (int i = 0; i < 2; i++)
                if (halves[i] == 1) repeat_halves(scratch.codes[i]);
            multiply_codes<2>(a, scratch, x, n_tokens, first, n);
        } else {
            multiply_codes<1>(a, scratch, x, n_tokens, first, n);
        }
    }
    for (int64_t t = 0; t < n_tokens; t++) {
        const f32x16 y0 = load<f32x16>(scratch.out[0][t]), y1 = load<f32x16>(scratch.out[1][t]);
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

// Groups of one part that one task walks side by side.
void multiply_one(const MatMulArgs& a, const Worker& worker) {
    const int n_parts = is_gated(a) ? 1 : a.n_parts;
    const int n_streams = is_gated(a) ? kStreams / 2 : kStreams;
    int64_t n_tasks = 0;
    for (int p = 0; p < n_parts; p++) n_tasks += (n_groups(a.parts[p]) + n_streams - 1) / n_streams;
    for (int64_t task; (task = worker.take()) < n_tasks;) {
        int p = 0;
        for (int64_t n; task >= (n = (n_groups(a.parts[p]) + n_streams - 1) / n_streams); p++) task -= n;
        const MatMulPart& part = a.parts[p];
        const int64_t group = task * n_streams, left = n_groups(part) - group;
        const int n = left < n_streams ? static_cast<int>(left) : n_streams;
        f32x16 y[2][kStreams];
        matvec(part, group, n, a.x, a.n_columns, y[0]);
        if (is_gated(a)) matvec(a.parts[1], group, n, a.x, a.n_columns, y[1]);
        for (int i = 0; i < n; i++) {
            if (is_gated(a))
                finish_gated(part, a.parts[1], a.gate, 0, group + i, y[0][i], y[1][i]);
            else
                finish(part, 0, group + i, y[0][i]);
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
