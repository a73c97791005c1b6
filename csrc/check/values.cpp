// Kernels of rows and of single values.
#include "../order.hpp"
#include "check.hpp"
#include "reference.hpp"

namespace motley {
namespace {

constexpr int64_t kN = 3, kColumns = 77, kSize = kN * kColumns;

template <class Expected>
void compare(const std::vector<float>& out, Expected&& expected, double tolerance, const std::string& where) {
    for (size_t i = 0; i < out.size(); i++) require(is_close(out[i], expected(static_cast<int64_t>(i)), tolerance), "a wrong value", where);
}

void check_row_kernels(Pool& pool, const std::string& name) {
    const auto x = random_floats(kSize), w = random_floats(kColumns);
    std::vector<float> out(kSize);
    pool.run_kernel(pool.kernels().norm, NormArgs{x.data(), w.data(), out.data(), {}, kN, kColumns, 1e-5f});
    compare(out, [&](int64_t i) {
        double squares = 0;
        for (int64_t c = 0; c < kColumns; c++) squares += std::pow(x[i / kColumns * kColumns + c], 2);
        return x[i] / std::sqrt(squares / kColumns + 1e-5) * w[i % kColumns];
    }, 1e-5, name + " norm");
    pool.run_kernel(pool.kernels().softmax, SoftmaxArgs{x.data(), out.data(), kN, kColumns});
    compare(out, [&](int64_t i) {
        double total = 0;
        for (int64_t c = 0; c < kColumns; c++) total += std::exp(static_cast<double>(x[i / kColumns * kColumns + c]) - x[i]);
        return 1 / total;
    }, 1e-5, name + " softmax");
    pool.run_kernel(pool.kernels().copy, CopyArgs{x.data(), out.data(), {1, 1, kColumns, kN}, {0, 0, 1, kColumns}, {0, 0, kN, 1}});
    compare(out, [&](int64_t i) { return x[i % kN * kColumns + i / kN]; }, 0, name + " copy");
}

void check_value_kernels(Pool& pool, const std::string& name) {
    const auto x = random_floats(kSize), b = random_floats(kColumns);
    std::vector<float> out(kSize);
    pool.run_kernel(pool.kernels().binary, BinaryArgs{x.data(), b.data(), out.data(), kSize, kColumns, 1, true});
    compare(out, [&](int64_t i) { return x[i] * b[i % kColumns]; }, 1e-6, name + " product");
    pool.run_kernel(pool.kernels().binary, BinaryArgs{x.data(), b.data(), out.data(), kSize, kN, kColumns, false});
    compare(out, [&](int64_t i) { return x[i] + b[i / kColumns]; }, 1e-6, name + " sum");
    for (const int function : {kNoFunction, kSilu, kGelu, kGeluTanh, kRelu, kSigmoid, kTanh}) {
        pool.run_kernel(pool.kernels().unary, UnaryArgs{x.data(), out.data(), kSize, function, 2.0f});
        compare(out, [&](int64_t i) { return function ? reference::apply(function, x[i]) : 2.0 * x[i]; }, 2e-6,
                name + " function " + std::to_string(function));
    }
    const std::vector<int32_t> ids{0, 4, 9, 10, 31};
    std::vector<int32_t> local(ids.size());
    pool.run_kernel(pool.kernels().local_ids, LocalIdsArgs{ids.data(), local.data(), 5, 2, {4, 30}, {10, 40}});
    require(local == std::vector<int32_t>{-1, 0, 5, -1, 7}, "wrong ids", name + " local ids");
}

void check_peaks(Pool& pool, const std::string& name) {
    for (const int64_t n : {int64_t{1}, kPeakStretch, 3 * kPeakStretch + 5}) {
        auto x = random_floats(n);
        x[n / 2] = -0.0f;
        std::vector<int32_t> peaks((n + kPeakStretch - 1) / kPeakStretch);
        for (const float last : {x[n - 1], INFINITY, NAN, -NAN}) {
            x[n - 1] = last;
            pool.kernels().peaks(x.data(), n, peaks.data());
            for (int64_t i = 0; i < n; i++) require(order_of(x[i]) <= peaks[i / kPeakStretch], "a larger value", name + " peaks");
            require(last == last || peaks.back() == INT32_MAX, "NaN is not the largest", name + " peaks");
        }
    }
    require(order_of(-0.0f) == order_of(0.0f) && order_of(-1.0f) < order_of(-0.5f) && order_of(-INFINITY) < order_of(-3e38f),
            "another order", name + " peaks");
}

void check_rotations(Pool& pool, const std::string& name) {
    constexpr int64_t kTokens = 3, kHeads = 2, kDim = 64, kPairs = 16;
    const auto x = random_floats(kTokens * kHeads * kDim);
    const std::vector<int32_t> positions{0, 7, 1000};
    std::vector<float> frequencies(kPairs), table(kTokens * kPairs * 2), out(x.size());
    for (int64_t p = 0; p < kPairs; p++) frequencies[p] = std::pow(10000.0f, -static_cast<float>(p) / kPairs);
    pool.run_kernel(pool.kernels().rope_table, RopeTableArgs{positions.data(), frequencies.data(), table.data(), kTokens, kPairs, 1.5f});
    for (const bool is_interleaved : {false, true}) {
        pool.run_kernel(pool.kernels().rope, RopeArgs{x.data(), out.data(), table.data(), kTokens, kHeads, kDim, kPairs, is_interleaved, 32});
        for (int64_t row = 0; row < kTokens * kHeads; row++) {
            std::vector<double> head(x.begin() + row * kDim, x.begin() + (row + 1) * kDim), turned = head;
            for (int64_t p = 0; p < kPairs; p++) {
                const double angle = static_cast<float>(positions[row / kHeads]) * frequencies[p];
                const int64_t a = is_interleaved ? 2 * p : p, b = is_interleaved ? 2 * p + 1 : p + kPairs;
                turned[a] = 1.5 * (head[a] * std::cos(angle) - head[b] * std::sin(angle));
                turned[b] = 1.5 * (head[a] * std::sin(angle) + head[b] * std::cos(angle));
            }
            for (int64_t i = 0; i < kDim; i += 32) {
                const auto expected = reference::hadamard({turned.begin() + i, turned.begin() + i + 32});
                for (int64_t j = 0; j < 32; j++) require(is_close(out[row * kDim + i + j], expected[j], 2e-4), "a wrong rope", name + " rope");
            }
        }
    }
    pool.run_kernel(pool.kernels().hadamard, HadamardArgs{x.data(), out.data(), kTokens * kHeads, kDim});
    for (int64_t row = 0; row < kTokens * kHeads; row++) {
        const auto expected = reference::hadamard({x.begin() + row * kDim, x.begin() + (row + 1) * kDim});
        for (int64_t j = 0; j < kDim; j++) require(is_close(out[row * kDim + j], expected[j], 1e-5), "a wrong transform", name + " hadamard");
    }
}

}  // namespace

// Rows longer than a thread's scratch memory; buffers are allocated with their exact size.
void check_long_rows(Pool& pool) {
    const int64_t n_rows = 2, columns = kScratchBytes / 4 + 96;
    const auto x = random_floats(n_rows * columns);
    std::vector<float> out(n_rows * columns);
    Quantized together(n_rows, columns), alone(n_rows, columns);
    pool.run_kernel(pool.kernels().norm, NormArgs{x.data(), nullptr, out.data(), together.view(x, columns), n_rows, columns, 1e-5f});
    pool.run_kernel(pool.kernels().norm, NormArgs{x.data(), nullptr, nullptr, alone.view(x, columns), n_rows, columns, 1e-5f});
    const std::string where = std::string(pool.kernels().name) + " long rows";
    require(together.codes == alone.codes && together.scales == alone.scales, "codes differ without the floats", where);
    pool.run_kernel(pool.kernels().softmax, SoftmaxArgs{x.data(), out.data(), n_rows, columns});
}

void check_values(Pool& pool) {
    const std::string name = pool.kernels().name;
    check_row_kernels(pool, name);
    check_value_kernels(pool, name);
    check_peaks(pool, name);
    check_rotations(pool, name);
}

}  // namespace motley
