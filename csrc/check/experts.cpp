// Mixture of experts: the choice of experts, and their FFNs as a program runs them.
#include <algorithm>
#include <numeric>

#include "../expert_ffn.hpp"
#include "check.hpp"
#include "reference.hpp"

namespace motley {
namespace {

constexpr int64_t kTokens = 5, kExperts = 8, kUsed = 3;

// The ids of one token's best experts, and their weights: sigmoid scores, or a softmax over those that are chosen.
void choose(const float* logits, const float* bias, int64_t n_groups_used, bool is_sigmoid, int64_t n_used, int32_t* ids, double* weights) {
    constexpr int64_t kGroups = 4, kSize = kExperts / kGroups;
    std::vector<double> scores(kExperts), worth(kGroups);
    for (int64_t e = 0; e < kExperts; e++) {
        scores[e] = (is_sigmoid ? reference::apply(kSigmoid, logits[e]) : logits[e]) + (bias ? bias[e] : 0);
        worth[e / kSize] += scores[e];
    }
    std::vector<int32_t> groups(kGroups), order(kExperts);
    std::iota(groups.begin(), groups.end(), 0);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(groups.begin(), groups.end(), [&](int a, int b) { return worth[a] > worth[b]; });
    for (int64_t g = n_groups_used; g < kGroups; g++)
        for (int64_t e = groups[g] * kSize; e < (groups[g] + 1) * kSize; e++) scores[e] = -INFINITY;
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return scores[a] > scores[b]; });
    double total = 0;
    for (int64_t i = 0; i < kUsed; i++) {
        ids[i] = i < n_used ? order[i] : -1;
        weights[i] = i >= n_used ? 0 : is_sigmoid ? reference::apply(kSigmoid, logits[ids[i]]) : std::exp(logits[ids[i]]);
        total += weights[i];
    }
    for (int64_t i = 0; i < n_used; i++) weights[i] *= 2.5 / total;
}

void check_route(Pool& pool, bool is_sigmoid, int64_t n_groups_used, bool has_bias) {
    const std::string where = std::string(pool.kernels().name) + " route";
    const auto logits = random_floats(kTokens * kExperts), bias = random_floats(kExperts);
    const std::vector<int32_t> n_used{3, 1, 2, 3, 0};
    std::vector<int32_t> ids(kTokens * kUsed);
    std::vector<float> weights(kTokens * kUsed);
    pool.run_kernel(pool.kernels().route, RouteArgs{logits.data(), n_used.data(), has_bias ? bias.data() : nullptr, ids.data(), kTokens,
                                                    kExperts, kUsed, 4, n_groups_used, is_sigmoid});
    pool.run_kernel(pool.kernels().route_weights,
                    RouteWeightsArgs{logits.data(), ids.data(), weights.data(), kTokens, kExperts, kUsed, is_sigmoid, true, 2.5f});
    for (int64_t t = 0; t < kTokens; t++) {
        int32_t best[kUsed];
        double expected[kUsed];
        choose(logits.data() + t * kExperts, has_bias ? bias.data() : nullptr, n_groups_used, is_sigmoid, n_used[t], best, expected);
        for (int64_t i = 0; i < kUsed; i++) {
            require(ids[t * kUsed + i] == best[i], "a wrong expert", where);
            require(is_close(weights[t * kUsed + i], expected[i], 1e-5), "a wrong weight", where);
        }
    }
}

// An expert's result for one row of values.
struct Expert {
    const Matrix &gate, &up, &down;
    const std::vector<float>& biases;  // of gate, up and down, one after the other
    int64_t number, n_hidden, n_columns;
    int function;

    double product(const Matrix& matrix, int64_t row, const double* x, double bias) const {
        double sum = bias;
        for (int64_t c = 0; c < matrix.n_columns; c++) sum += matrix.at(row, c) * x[c];
        return sum;
    }
    std::vector<double> results(const double* x) const {
        const float* bias = biases.data();
        std::vector<double> hidden(n_hidden), out(n_columns);
        for (int64_t h = 0; h < n_hidden; h++) {
            const int64_t row = number * n_hidden + h;
            hidden[h] = reference::gated(function, product(gate, row, x, bias[row]), product(up, row, x, bias[kExperts * n_hidden + row]));
        }
        for (int64_t c = 0; c < n_columns; c++) {
            const int64_t row = number * n_columns + c;
            out[c] = product(down, row, hidden.data(), bias[2 * kExperts * n_hidden + row]);
        }
        return out;
    }
};

// With exact products, and fewer rows than planned. Products by codes are compared in products.cpp.
void check_ffn(Pool& own, const FormatShape& shape, int function, int64_t n_actual) {
    const std::string where = std::string(own.kernels().name) + " experts of format " + std::to_string(shape.format);
    auto pool = std::make_shared<Pool>(3, own.kernels().name, std::vector<int>{});
    const int64_t n_blocks = shape.columns == 2 ? 16 : 1, n_columns = n_blocks * shape.columns, n_hidden = n_columns;
    const Matrix gate(shape, kExperts * n_hidden, n_blocks), up(shape, kExperts * n_hidden, n_blocks), down(shape, kExperts * n_columns, n_blocks);
    const auto repacked_gate = gate.repacked(own), repacked_up = up.repacked(own), repacked_down = down.repacked(own);
    const auto biases = random_floats(kExperts * (2 * n_hidden + n_columns)), x = random_floats(kTokens * n_columns), residual = random_floats(x.size());
    const auto weights = random_floats(kTokens * kUsed);
    const std::vector<int32_t> ids{5, 0, 7, 2, 5, -1, 5, 7, 1, -1, kExperts, 1 << 30, 3, 5, 6};  // two that no expert has
    std::vector<float> out(x.size(), 99.0f);
    std::vector<uint8_t> room(ExpertRoom(kTokens, kUsed, n_columns, n_hidden, kExperts).size + 64);
    const auto address = [](const void* p) { return reinterpret_cast<Address>(p); };
    const Address aligned_room = (address(room.data()) + 63) / 64 * 64;
    const int64_t stride = gate.row_bytes * n_hidden;
    Program program(pool);
    program.set_rows(kTokenRows, kTokens);
    ExpertFfn{address(x.data()), 0, kTokens, n_columns, address(ids.data()), address(weights.data()), kUsed, kExperts,
              {ExpertTuple{address(repacked_gate.data()), shape.format, n_hidden, address(biases.data()), stride},
               ExpertTuple{address(repacked_up.data()), shape.format, n_hidden, address(biases.data() + kExperts * n_hidden), stride},
               ExpertTuple{address(repacked_down.data()), shape.format, n_columns, address(biases.data() + 2 * kExperts * n_hidden), stride}},
              function, address(residual.data()), address(out.data()), aligned_room, true, false, true}
        .add_to(program);
    program.run(n_actual, 0);
    for (int64_t t = 0; t < kTokens; t++) {
        std::vector<double> expected(n_columns), row(x.begin() + t * n_columns, x.begin() + (t + 1) * n_columns);
        for (int64_t i = 0; i < kUsed; i++) {
            if (ids[t * kUsed + i] < 0 || ids[t * kUsed + i] >= kExperts) continue;
            const auto results = Expert{gate, up, down, biases, ids[t * kUsed + i], n_hidden, n_columns, function}.results(row.data());
            for (int64_t c = 0; c < n_columns; c++) expected[c] += weights[t * kUsed + i] * results[c];
        }
        double most = 0;
        for (const double value : expected) most = std::max(most, std::fabs(value));
        for (int64_t c = 0; c < n_columns; c++) {
            const float got = out[t * n_columns + c];
            if (t < n_actual)
                require(is_close(got, expected[c] + residual[t * n_columns + c], 1e-4, most), "a wrong result", where);
            else
                require(got == 99.0f, "a row that the batch does not have is computed", where);
        }
    }
}

}  // namespace

void check_experts(Pool& pool) {
    for (const bool is_sigmoid : {false, true})
        for (const bool has_bias : {false, true})
            for (const int64_t n_groups_used : {int64_t{4}, int64_t{2}}) check_route(pool, is_sigmoid, n_groups_used, has_bias);
    for (const auto& shape : kFormats)
        if (shape.format == kF32 || shape.format == kMXFP4 || shape.format == kQ8_0)
            for (const int64_t n_actual : {kTokens, int64_t{1}, int64_t{3}})
                for (const int function : {kSilu, kClampedSwiglu}) check_ffn(pool, shape, function, n_actual);
}

}  // namespace motley
