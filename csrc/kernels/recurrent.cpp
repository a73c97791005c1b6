// Layers with a recurrent state (graph/ops/recurrent.py): the causal convolution and the gated delta rule.
//
//     causal_conv     a task is a sequence and some channels
//     delta_net       a task is a sequence, a value head and some columns of its state
//     delta_pending   stores what a later batch needs of rows that stay pending
//
// For a value head with the matrix S (key dim, value dim), a row does
//
//     m = Sᵀ·k, o = Sᵀ·q          delta = beta · (v - e^decay · m)
//     out = (e^decay · o + (k·q) · delta) / sqrt(key dim)          S ← e^decay · S + k · deltaᵀ
//
// Columns of S never meet, so a task has a few vectors of columns of S in the first-level cache while it goes through all
// rows, however many there are (a single row is different, see run_row). That is as fast as the chunked form of the delta rule, whose matrix products take more
// operations than this, and has no exponentials of sums.
#include <algorithm>
#include <cmath>

#include "../kernels.hpp"
#include "functions.hpp"
#include "simd.hpp"

namespace motley::MOTLEY_ISA {
namespace {

constexpr int64_t kChannels = 256;  // channels of a task
constexpr int kVectors = 2;         // vectors of columns of a task
constexpr int kWideVectors = kVectorBytes == 64 ? 8 : 4;  // of a task with one row: two sums of each fit the registers

int64_t shorter(int64_t a, int64_t b) { return a < b ? a : b; }

float from_bf16(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
}

// Rounded to the nearest, ties to even; NaN stays NaN.
uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// n values of a state from value `at` on.
void load_state(const StateStore& store, int64_t at, float* out, int64_t n) {
    if (store.is_bf16) {
        const auto* states = static_cast<const uint16_t*>(store.states) + at;
        for (int64_t i = 0; i < n; i++) out[i] = from_bf16(states[i]);
    } else {
        std::memcpy(out, static_cast<const float*>(store.states) + at, n * sizeof(float));
    }
}

void save_state(const StateStore& store, int64_t at, const float* x, int64_t n) {
    if (store.is_bf16) {
        auto* states = static_cast<uint16_t*>(store.states) + at;
        for (int64_t i = 0; i < n; i++) states[i] = to_bf16(x[i]);
    } else {
        std::memcpy(static_cast<float*>(store.states) + at, x, n * sizeof(float));
    }
}

// The ring's inputs of a position; a token has `width` values.
float* pending(const StateStore& store, int64_t ring, int64_t position, int64_t width) {
    return store.rings + (ring * store.n_pending + position % store.n_pending) * width;
}

// The rows that a convolution of some channels reads, oldest first: the state, pending tokens, the batch's rows.
struct Line {
    const CausalConvArgs& a;
    const StateSpan& span;
    const float* window;  // (taps - 1, kChannels): the state
    int64_t first, n_pending;

    const float* row(int64_t i) const {
        if (i < a.n_taps - 1) return window + i * kChannels;
        i -= a.n_taps - 1;
        if (i < n_pending) return pending(a.store, span.source_ring, span.n_read + i, a.n_channels) + first;
        return a.x + (span.first_row + i - n_pending) * a.n_channels + first;
    }
};

void convolve(const CausalConvArgs& a, const StateSpan& span, int64_t first, int64_t n, float* window, float* ahead) {
    const int64_t n_state = a.n_taps - 1, size = n_state * a.n_channels;
    for (int64_t t = 0; t < n_state; t++) {
        if (span.source < 0)
            std::fill(window + t * kChannels, window + t * kChannels + n, 0.0f);
        else
            load_state(a.store, span.source * size + t * a.n_channels + first, window + t * kChannels, n);
    }
    const Line line{a, span, window, first, span.position - span.n_read};
    for (int64_t i = 0; i < span.n_rows; i++) {
        const float* rows[kMaxTaps];
        for (int64_t t = 0; t < a.n_taps; t++) rows[t] = line.row(line.n_pending + i + t);
        float* out = a.out + (span.first_row + i) * a.n_channels + first;
        for (int64_t c = 0; c < n; c += kLanes) {
            const int lanes = static_cast<int>(shorter(kLanes, n - c));
            f32v sum{};
            for (int64_t t = 0; t < a.n_taps; t++)
                sum += load_some(rows[t] + c, lanes) * load_some(a.weight + t * a.n_channels + first + c, lanes);
            store_some(out + c, apply(kSilu, sum), lanes);
        }
    }
    // All reads before the first write: source and target may be the same.
    const int64_t folded = span.n_written - span.n_read;
    for (int64_t t = 0; t < n_state; t++) std::memcpy(ahead + t * kChannels, line.row(folded + t), n * sizeof(float));
    for (int64_t t = 0; t < n_state; t++)
        save_state(a.store, span.target * size + t * a.n_channels + first, ahead + t * kChannels, n);
    for (int64_t p = span.n_written; p < span.position + span.n_rows; p++)
        std::memcpy(pending(a.store, span.target_ring, p, a.n_channels) + first,
                    a.x + (span.first_row + p - span.position) * a.n_channels + first, n * sizeof(float));
}

int64_t key_head(const DeltaNetArgs& a, int64_t head) { return a.is_cyclic ? head % a.n_key_heads : head / (a.n_heads / a.n_key_heads); }

float dot(const float* x, const float* y, int64_t n) {
    f32v sum{};
    for (int64_t i = 0; i < n; i += kLanes) {
        const int lanes = static_cast<int>(shorter(kLanes, n - i));
        sum += load_some(x + i, lanes) * load_some(y + i, lanes);
    }
    return sum_lanes(sum);
}

// x / sqrt(Σ x² + eps)
void normalize(const float* x, float* out, int64_t n, float eps) {
    const float factor = 1.0f / std::sqrt(dot(x, x, n) + eps);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * factor;
}

// Where the parts of one row are.
struct DeltaRow {
    const float *q, *k, *v;
    float decay, beta;
};

DeltaRow row_at(const DeltaNetArgs& a, int64_t row, int64_t head) {
    const int64_t n_keys = a.n_key_heads * a.key_dim, key = key_head(a, head) * a.key_dim;
    const float* mixed = a.mixed + row * (2 * n_keys + a.n_heads * a.value_dim);
    const int64_t at = row * a.n_heads + head;
    return {mixed + key, mixed + n_keys + key, mixed + 2 * n_keys + head * a.value_dim, a.decay[at], a.beta[at]};
}

// Rows are far from each other, which is no pattern for the hardware, so that a task prefetches its next ones.
constexpr int64_t kRowsAhead = 2;

[[gnu::always_inline]] inline void fetch_row(const DeltaNetArgs& a, const DeltaRow& x, int64_t first, int64_t n) {
    fetch<1>(x.q, a.key_dim * 4);
    fetch<1>(x.k, a.key_dim * 4);
    fetch<1>(x.v + first, n * 4);
}

// V vectors of columns of a head's state, the last one with `lanes` lanes.
template <int V>
struct Columns {
    float* s;  // (key dim, V · kLanes)
    int64_t key_dim;
    int lanes;

    static constexpr int64_t kWidth = V * kLanes;
    int count(int v) const { return v + 1 < V ? kLanes : lanes; }

    // One token without its query: a pending one.
    void fold(const float* k, const float* value, float decay, float beta) {
        f32v m[V]{};
        for (int64_t i = 0; i < key_dim; i++)
            for (int v = 0; v < V; v++) m[v] += load<f32v>(s + i * kWidth + v * kLanes) * k[i];
        update(k, value, std::exp(decay), beta, m);
    }

    void step(const float* q, const float* k, float kq, const float* value, float decay, float beta, float scale, float* out) {
        f32v m[V]{}, o[V]{};
        for (int64_t i = 0; i < key_dim; i++)
            for (int v = 0; v < V; v++) {
                const f32v x = load<f32v>(s + i * kWidth + v * kLanes);
                m[v] += x * k[i];
                o[v] += x * q[i];
            }
        const float kept = std::exp(decay);
        update(k, value, kept, beta, m);
        for (int v = 0; v < V; v++) store_some(out + v * kLanes, (o[v] * kept + m[v] * kq) * scale, count(v));
    }

    // S ← kept · S + k · deltaᵀ; m becomes delta.
    void update(const float* k, const float* value, float kept, float beta, f32v* m) {
        for (int v = 0; v < V; v++) m[v] = (load_some(value + v * kLanes, count(v)) - m[v] * kept) * beta;
        for (int64_t i = 0; i < key_dim; i++)
            for (int v = 0; v < V; v++) {
                float* at = s + i * kWidth + v * kLanes;
                store(at, load<f32v>(at) * kept + m[v] * k[i]);
            }
    }
};

// One row of a sequence and V whole vectors of columns, from the state in `from` (null: zeros) to that in `to`, which may
// be the same: nothing is copied, and a state is read in the order of addresses. `room`: this thread's.
template <int V>
void run_row(const DeltaNetArgs& a, int64_t row, int64_t head, int64_t first, const float* from, float* to, float* room) {
    float *q = room, *k = q + a.key_dim;
    const DeltaRow x = row_at(a, row, head);
    normalize(x.q, q, a.key_dim, a.eps);
    normalize(x.k, k, a.key_dim, a.eps);
    f32v m[V]{}, o[V]{};
    for (int64_t i = 0; from && i < a.key_dim; i++)
        for (int v = 0; v < V; v++) {
            const f32v s = load<f32v>(from + i * a.value_dim + v * kLanes);
            m[v] += s * k[i];
            o[v] += s * q[i];
        }
    const float kept = std::exp(x.decay), kq = dot(k, q, a.key_dim), scale = 1.0f / std::sqrt(static_cast<float>(a.key_dim));
    float* out = a.out + (row * a.n_heads + head) * a.value_dim + first;
    for (int v = 0; v < V; v++) {
        m[v] = (load<f32v>(x.v + first + v * kLanes) - m[v] * kept) * x.beta;
        store(out + v * kLanes, (o[v] * kept + m[v] * kq) * scale);
    }
    for (int64_t i = 0; i < a.key_dim; i++)
        for (int v = 0; v < V; v++) {
            const f32v s = from ? load<f32v>(from + i * a.value_dim + v * kLanes) : f32v{};
            store(to + i * a.value_dim + v * kLanes, s * kept + m[v] * k[i]);
        }
}

// Whether each sequence has one row, which becomes part of its float32 state, and run_row takes whole vectors of columns.
bool are_single_rows(const DeltaNetArgs& a) {
    if (a.store.is_bf16 || a.value_dim % (kWideVectors * kLanes)) return false;
    return std::all_of(a.store.batch->spans, a.store.batch->spans + a.store.batch->n_spans, [](const StateSpan& span) {
        return span.n_rows == 1 && span.n_read == span.position && span.n_written == span.position + 1;
    });
}

void run_single_rows(const DeltaNetArgs& a, const Worker& worker) {
    constexpr int64_t kWidth = kWideVectors * kLanes;
    const int64_t n_parts = a.value_dim / kWidth, size = a.n_heads * a.key_dim * a.value_dim;
    auto* states = static_cast<float*>(a.store.states);
    for (int64_t task; (task = worker.take()) < a.store.batch->n_spans * a.n_heads * n_parts;) {
        const int64_t first = task % n_parts * kWidth, head = task / n_parts % a.n_heads;
        const StateSpan& span = a.store.batch->spans[task / n_parts / a.n_heads];
        const int64_t at = head * a.key_dim * a.value_dim + first;
        const float* from = span.source < 0 ? nullptr : states + span.source * size + at;
        run_row<kWideVectors>(a, span.first_row, head, first, from, states + span.target * size + at, reinterpret_cast<float*>(worker.scratch));
    }
}

// Columns first … first + n - 1 of one head's state, through all rows of a sequence. `room`: this thread's.
template <int V>
void run_columns(const DeltaNetArgs& a, const StateSpan& span, int64_t head, int64_t first, int64_t n, float* room) {
    constexpr int64_t kWidth = V * kLanes;
    Columns<V> columns{room, a.key_dim, static_cast<int>(n - (V - 1) * kLanes)};
    float *q = room + a.key_dim * kWidth, *k = q + a.key_dim;
    const int64_t size = a.n_heads * a.key_dim * a.value_dim, head_at = head * a.key_dim * a.value_dim + first;
    std::fill(room, room + a.key_dim * kWidth, 0.0f);
    if (span.source >= 0)
        for (int64_t i = 0; i < a.key_dim; i++)
            load_state(a.store, span.source * size + head_at + i * a.value_dim, room + i * kWidth, n);
    const int64_t width = a.key_dim + a.value_dim + 2;
    for (int64_t p = span.n_read; p < span.position; p++) {
        const float* token = pending(a.store, span.source_ring, p, a.n_heads * width) + head * width;
        columns.fold(token, token + a.key_dim + first, token[width - 2], token[width - 1]);
    }
    const auto save = [&] {
        for (int64_t i = 0; i < a.key_dim; i++)
            save_state(a.store, span.target * size + head_at + i * a.value_dim, room + i * kWidth, n);
    };
    const float scale = 1.0f / std::sqrt(static_cast<float>(a.key_dim));
    if (span.n_written == span.position) save();
    for (int64_t i = 0; i < span.n_rows; i++) {
        const int64_t row = span.first_row + i;
        if (i + kRowsAhead < span.n_rows) fetch_row(a, row_at(a, row + kRowsAhead, head), first, n);
        const DeltaRow x = row_at(a, row, head);
        normalize(x.q, q, a.key_dim, a.eps);
        normalize(x.k, k, a.key_dim, a.eps);
        columns.step(q, k, dot(k, q, a.key_dim), x.v + first, x.decay, x.beta, scale,
                     a.out + (row * a.n_heads + head) * a.value_dim + first);
        if (span.position + i + 1 == span.n_written) save();
    }
}

}  // namespace

void causal_conv(const CausalConvArgs& a, const Worker& worker) {
    const int64_t n_parts = (a.n_channels + kChannels - 1) / kChannels;
    auto* window = reinterpret_cast<float*>(worker.scratch);
    for (int64_t task; (task = worker.take()) < a.store.batch->n_spans * n_parts;) {
        const int64_t first = task % n_parts * kChannels;
        convolve(a, a.store.batch->spans[task / n_parts], first, shorter(kChannels, a.n_channels - first), window,
                 window + (a.n_taps - 1) * kChannels);
    }
}

void delta_net(const DeltaNetArgs& a, const Worker& worker) {
    if (are_single_rows(a)) return run_single_rows(a, worker);
    constexpr int64_t kWidth = kVectors * kLanes;
    const int64_t n_parts = (a.value_dim + kWidth - 1) / kWidth;
    auto* room = reinterpret_cast<float*>(worker.scratch);
    for (int64_t task; (task = worker.take()) < a.store.batch->n_spans * a.n_heads * n_parts;) {
        const int64_t first = task % n_parts * kWidth, n = shorter(kWidth, a.value_dim - first);
        const int64_t head = task / n_parts % a.n_heads;
        const StateSpan& span = a.store.batch->spans[task / n_parts / a.n_heads];
        if (n > kLanes)
            run_columns<kVectors>(a, span, head, first, n, room);
        else
            run_columns<1>(a, span, head, first, n, room);
    }
}

void delta_pending(const DeltaNetArgs& a, const Worker& worker) {
    const int64_t width = a.key_dim + a.value_dim + 2;
    for (int64_t task; (task = worker.take()) < a.store.batch->n_spans * a.n_heads;) {
        const StateSpan& span = a.store.batch->spans[task / a.n_heads];
        const int64_t head = task % a.n_heads;
        for (int64_t p = span.n_written; p < span.position + span.n_rows; p++) {
            const DeltaRow x = row_at(a, span.first_row + p - span.position, head);
            float* token = pending(a.store, span.target_ring, p, a.n_heads * width) + head * width;
            normalize(x.k, token, a.key_dim, a.eps);
            std::memcpy(token + a.key_dim, x.v, a.value_dim * sizeof(float));
            token[width - 2] = x.decay;
            token[width - 1] = x.beta;
        }
    }
}

}  // namespace motley::MOTLEY_ISA
