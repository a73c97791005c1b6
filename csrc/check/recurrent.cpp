// Recurrent states: a sequence in batches of several sizes, some rows pending or rejected, against one plain pass.
#include <algorithm>

#include "check.hpp"

namespace motley {
namespace {

constexpr int64_t kRows = 23, kRing = 4;

// Batches of one sequence: rows that run, and how many of them, at the end, are rejected. Rejected ones run again.
struct Part {
    int64_t n_rows, n_rejected;
};
constexpr Part kParts[] = {{3, 0}, {1, 0}, {5, 3}, {4, 4 - 1}, {9, 0}, {6, 2}, {2, 0}, {3, 0}};

// Runs kRows rows through `run`, in the second slot and ring, beginning with those of nothing.
template <class Run>
void in_parts(Run run) {
    int64_t position = 0, n_read = 0, slot = -1, ring = -1;
    for (const Part& part : kParts) {
        const int64_t n = std::min(part.n_rows, kRows - position), n_pending = std::min({part.n_rejected, n - 1, kRing});
        if (n < 1) break;
        const int64_t target = slot == 1 ? 2 : 1, target_ring = ring == 0 ? 1 : 0;
        const StateSpan span{0, n, position, slot, n_read, ring, target, position + n - n_pending, target_ring};
        run(span);
        slot = target;
        ring = target_ring;
        n_read = span.n_written;
        position = span.n_written + n_pending / 2;  // half of the pending rows are right
    }
    require(position == kRows, "rows are missing", "recurrent");
}

void check_conv(Pool& pool, int64_t n_channels, int64_t n_taps) {
    const std::string where = std::string(pool.kernels().name) + " causal_conv";
    const auto x = random_floats(kRows * n_channels), weight = random_floats(n_taps * n_channels);
    std::vector<float> states(3 * (n_taps - 1) * n_channels), rings(2 * kRing * n_channels), out(kRows * n_channels);
    in_parts([&](const StateSpan& span) {
        const StateBatchView view{&span, 1};
        std::vector<float> result(span.n_rows * n_channels);
        pool.run_kernel(pool.kernels().causal_conv,
                        CausalConvArgs{x.data() + span.position * n_channels, weight.data(), result.data(), n_channels, n_taps,
                                       {states.data(), false, rings.data(), kRing, &view}});
        std::copy(result.begin(), result.end(), out.begin() + span.position * n_channels);
    });
    for (int64_t p = 0; p < kRows; p++)
        for (int64_t c = 0; c < n_channels; c++) {
            double sum = 0;
            for (int64_t t = 0; t < n_taps; t++) {
                const int64_t at = p - n_taps + 1 + t;
                if (at >= 0) sum += double(x[at * n_channels + c]) * weight[t * n_channels + c];
            }
            require(is_close(out[p * n_channels + c], sum / (1 + std::exp(-sum)), 1e-5), "a wrong value", where);
        }
}

void check_delta(Pool& pool, int64_t n_keys, int64_t n_heads, int64_t key_dim, int64_t value_dim, bool is_cyclic) {
    const std::string where = std::string(pool.kernels().name) + " delta_net";
    const int64_t width = 2 * n_keys * key_dim + n_heads * value_dim, size = n_heads * key_dim * value_dim;
    const auto mixed = random_floats(kRows * width);
    auto decay = random_floats(kRows * n_heads), beta = random_floats(kRows * n_heads);
    for (float& g : decay) g = -std::fabs(g);
    for (float& b : beta) b = 1 / (1 + std::exp(-b));
    std::vector<float> states(3 * size), rings(2 * kRing * n_heads * (key_dim + value_dim + 2)), out(kRows * n_heads * value_dim);
    in_parts([&](const StateSpan& span) {
        const StateBatchView view{&span, 1};
        std::vector<float> result(span.n_rows * n_heads * value_dim);
        const DeltaNetArgs args{mixed.data() + span.position * width, decay.data() + span.position * n_heads,
                                beta.data() + span.position * n_heads, result.data(), n_keys, n_heads, key_dim, value_dim,
                                1e-6f, is_cyclic, {states.data(), false, rings.data(), kRing, &view}};
        pool.run_kernel(pool.kernels().delta_net, args);
        pool.run_kernel(pool.kernels().delta_pending, args);
        std::copy(result.begin(), result.end(), out.begin() + span.position * n_heads * value_dim);
    });
    for (int64_t h = 0; h < n_heads; h++) {
        const int64_t key = is_cyclic ? h % n_keys : h / (n_heads / n_keys);
        std::vector<double> s(key_dim * value_dim), q(key_dim), k(key_dim);
        for (int64_t p = 0; p < kRows; p++) {
            const float* row = mixed.data() + p * width;
            double q_norm = 1e-6, k_norm = 1e-6;
            for (int64_t i = 0; i < key_dim; i++) {
                q[i] = row[key * key_dim + i];
                k[i] = row[(n_keys + key) * key_dim + i];
                q_norm += q[i] * q[i];
                k_norm += k[i] * k[i];
            }
            for (int64_t i = 0; i < key_dim; i++) q[i] /= std::sqrt(q_norm), k[i] /= std::sqrt(k_norm);
            const double kept = std::exp(double(decay[p * n_heads + h])), strength = beta[p * n_heads + h];
            for (int64_t j = 0; j < value_dim; j++) {
                double known = 0, result = 0;
                for (int64_t i = 0; i < key_dim; i++) known += (s[i * value_dim + j] *= kept) * k[i];
                const double delta = strength * (row[2 * n_keys * key_dim + h * value_dim + j] - known);
                for (int64_t i = 0; i < key_dim; i++) result += (s[i * value_dim + j] += k[i] * delta) * q[i];
                require(is_close(out[(p * n_heads + h) * value_dim + j], result / std::sqrt(double(key_dim)), 1e-4), "a wrong value", where);
            }
        }
    }
}

// Rows one after the other, in place, have the same bits as all of them in one batch.
void check_single_rows(Pool& pool, int64_t key_dim, int64_t value_dim) {
    const int64_t n_heads = 2, n_rows = 5, width = 2 * key_dim + n_heads * value_dim, size = n_heads * key_dim * value_dim;
    const auto mixed = random_floats(n_rows * width), beta = random_floats(n_rows * n_heads);
    auto decay = random_floats(n_rows * n_heads);
    for (float& g : decay) g = -std::fabs(g);
    std::vector<float> state(size), other(size), rings(kRing * n_heads * (key_dim + value_dim + 2));
    std::vector<float> out(n_rows * n_heads * value_dim), again(out.size());
    const auto run = [&](const StateSpan& span, std::vector<float>& states, std::vector<float>& result) {
        const StateBatchView view{&span, 1};
        pool.run_kernel(pool.kernels().delta_net,
                        DeltaNetArgs{mixed.data() + span.position * width, decay.data() + span.position * n_heads,
                                     beta.data() + span.position * n_heads, result.data() + span.position * n_heads * value_dim, 1, n_heads,
                                     key_dim, value_dim, 1e-6f, false, {states.data(), false, rings.data(), kRing, &view}});
    };
    run({0, n_rows, 0, -1, 0, 0, 0, n_rows, 0}, state, out);
    for (int64_t i = 0; i < n_rows; i++) run({0, 1, i, i ? 0 : -1, i, 0, 0, i + 1, 0}, other, again);
    require(out == again && state == other, "other bits row by row", std::string(pool.kernels().name) + " delta_net");
}

}  // namespace

void check_recurrent(Pool& pool) {
    for (const int64_t n_taps : {int64_t{2}, int64_t{4}}) {
        check_conv(pool, 5, n_taps);
        check_conv(pool, 300, n_taps);
    }
    check_delta(pool, 1, 1, 3, 5, false);
    check_delta(pool, 2, 4, 16, 16, false);
    check_delta(pool, 2, 4, 32, 40, true);
    check_delta(pool, 2, 4, 16, 128, false);
    check_single_rows(pool, 128, 128);
    check_single_rows(pool, 20, 256);
}

}  // namespace motley
