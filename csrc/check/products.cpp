// Matrix products, and the repacking of their weights.
#include <cstring>

#include "check.hpp"
#include "reference.hpp"

namespace motley {

const std::vector<FormatShape> kFormats = {
    {kF32, 2, 8, {}},           {kF16, 2, 4, {}},           {kBF16, 2, 4, {}},        {kQ8_0, 32, 34, {0}},
    {kQ4_0, 32, 18, {0}},       {kQ4_1, 32, 20, {0, 2}},    {kQ5_0, 32, 22, {0}},     {kQ5_1, 32, 24, {0, 2}},
    {kQ2_K, 256, 84, {80, 82}}, {kQ3_K, 256, 110, {108}},   {kQ4_K, 256, 144, {0, 2}}, {kQ5_K, 256, 176, {0, 2}},
    {kQ6_K, 256, 210, {208}},   {kIQ4_NL, 32, 18, {0}},     {kIQ4_XS, 256, 136, {0}},
    {kMXFP4, 32, 17, {}, 0},
};

Matrix::Matrix(const FormatShape& form, int64_t rows, int64_t n_blocks)
    : shape(form), n_rows(rows), n_columns(n_blocks * form.columns), row_bytes(n_blocks * form.bytes), bytes(rows * row_bytes) {
    for (auto& byte : bytes) byte = static_cast<uint8_t>(rng());
    const int width = form.bytes / form.columns;  // bytes of a plain number
    if (form.columns == 2)
        for (size_t i = width - 1; i < bytes.size(); i += width) bytes[i] = 0x30 + rng() % 15 + (rng() % 2 ? 0x80 : 0);
    for (int64_t block = 0; block < rows * n_blocks; block++) {
        for (const int at : form.halves) bytes[block * form.bytes + at + 1] = static_cast<uint8_t>(0x20 + rng() % 16 + (rng() % 2 ? 0x80 : 0));
        if (form.exponent_at >= 0) bytes[block * form.bytes + form.exponent_at] = static_cast<uint8_t>(120 + rng() % 8);
    }
}

double Matrix::at(int64_t row, int64_t column) const {
    const uint8_t* block = bytes.data() + row * row_bytes + column / shape.columns * shape.bytes;
    return reference::weight(shape.format, block, static_cast<int>(column % shape.columns));
}

std::vector<uint8_t> Matrix::repacked(Pool& pool) const {
    std::vector<uint8_t> out((n_rows + 15) / 16 * 16 * row_bytes);
    pool.run_kernel(pool.kernels().repack, RepackArgs{bytes.data(), out.data(), shape.format, n_rows, n_columns, row_bytes});
    return out;
}

namespace {

// x in the form that a product reads: exact, or as codes.
double activation(const std::vector<float>& x, const Quantized& q, bool is_exact, int64_t i) {
    return is_exact ? x[i] : static_cast<double>(q.codes[i]) * q.scales[i / 32];
}

struct Result {
    double value = 0, size = 0;  // the sum of products, and of their magnitudes
};

Result product(const Matrix& matrix, const std::vector<float>& x, const Quantized& q, bool is_exact, int64_t token, int64_t row) {
    Result result;
    for (int64_t c = 0; c < matrix.n_columns; c++) {
        const double term = matrix.at(row, c) * activation(x, q, is_exact, token * matrix.n_columns + c);
        result.value += term;
        result.size += std::fabs(term);
    }
    return result;
}

void check_quantized(const std::vector<float>& x, const Quantized& q, const std::string& where) {
    for (size_t step = 0; step < q.scales.size(); step++) {
        double halves[2] = {};
        for (size_t i = 32 * step; i < 32 * step + 32; i++) {
            const double back = static_cast<double>(q.codes[i]) * q.scales[step];
            require(std::fabs(back - x[i]) <= 0.501 * q.scales[step], "an activation is not rounded to its nearest code", where);
            halves[i % 32 / 16] += back;
        }
        for (size_t h = 2 * step; h < 2 * step + 2; h++) {
            require(is_close(q.half_sums[h], halves[h % 2], 1e-4), "a wrong sum of codes", where);
            require(is_close(q.code_sums[h] * q.scales[step], halves[h % 2], 1e-4), "a wrong sum of codes", where);
        }
        require(is_close(q.sums[step], halves[0] + halves[1], 1e-4), "a wrong sum of codes", where);
    }
}

void check_unpacked(Pool& pool, const Matrix& matrix, const std::vector<uint8_t>& repacked, const std::string& where) {
    std::vector<float> unpacked(matrix.n_rows * matrix.n_columns), gathered(unpacked.size());
    pool.run_kernel(pool.kernels().unpack, UnpackArgs{repacked.data(), unpacked.data(), matrix.shape.format, matrix.n_rows, matrix.n_columns});
    std::vector<int32_t> ids(matrix.n_rows);
    for (int64_t i = 0; i < matrix.n_rows; i++) ids[i] = static_cast<int32_t>(matrix.n_rows - 1 - i);
    pool.run_kernel(pool.kernels().gather, GatherArgs{matrix.bytes.data(), matrix.shape.format, matrix.row_bytes, matrix.n_rows,
                                                      ids.data(), matrix.n_rows, matrix.n_columns, gathered.data()});
    for (int64_t row = 0; row < matrix.n_rows; row++)
        for (int64_t c = 0; c < matrix.n_columns; c++) {
            const double expected = matrix.at(row, c), size = std::fabs(expected);
            const double got = unpacked[row * matrix.n_columns + c], found = gathered[ids[row] * matrix.n_columns + c];
            require(std::fabs(got - expected) <= 1e-5 * (size + 1), "a repacked weight is not its value", where);
            require(found == got, "a row by id is not the row", where);
        }
}

// `weight`: the matrix in the kernels' layout, in `format`.
void check_multiply(Pool& pool, const Matrix& matrix, const uint8_t* weight, int format, bool is_exact, const std::string& where) {
    const int64_t n_tokens = 37, n_rows = matrix.n_rows, n_columns = matrix.n_columns;
    const auto x = random_floats(n_tokens * n_columns), bias = random_floats(n_rows), residual = random_floats(n_tokens * n_rows);
    Quantized q(n_tokens, n_columns);
    const bool uses_floats = is_exact || matrix.shape.columns == 2;
    if (matrix.shape.columns != 2) {
        pool.run_kernel(pool.kernels().quantize, QuantizeArgs{q.view(x, n_columns), n_tokens, n_columns});
        check_quantized(x, q, where);
    }
    std::vector<float> all_plain, all_gated;  // of the largest batch
    for (const int64_t n : {n_tokens, int64_t{0}, int64_t{1}, int64_t{2}, int64_t{3}, int64_t{5}, int64_t{8}, int64_t{17}}) {
        std::vector<float> plain(n * n_rows), gated(n * n_rows);
        MatMulArgs args{q.view(x, n_columns), n, n_columns, 1, {}, kNoFunction, is_exact};
        args.parts[0] = {weight, format, n_rows, bias.data(), residual.data(), plain.data(), n_rows};
        pool.run_kernel(pool.kernels().matmul, args);
        args.n_parts = 2;
        args.gate = kSilu;
        args.parts[0] = {weight, format, n_rows, bias.data(), nullptr, gated.data(), n_rows};
        args.parts[1] = {weight, format, n_rows, nullptr, nullptr, nullptr, n_rows};
        pool.run_kernel(pool.kernels().matmul, args);
        if (n < n_tokens) {
            const auto is_same = [&](const std::vector<float>& all, const std::vector<float>& own) {
                return own.empty() || std::memcmp(all.data(), own.data(), own.size() * sizeof(float)) == 0;
            };
            require(is_same(all_plain, plain) && is_same(all_gated, gated), "a row depends on the number of rows", where);
            continue;
        }
        all_plain = plain;
        all_gated = gated;
        for (int64_t t = 0; t < n; t++)
            for (int64_t row = 0; row < n_rows; row++) {
                const Result y = product(matrix, x, q, uses_floats, t, row);
                const int64_t at = t * n_rows + row;
                require(is_close(plain[at], y.value + bias[row] + residual[at], 2e-5, y.size), "a wrong product", where);
                const double gate = reference::apply(kSilu, y.value + bias[row]);
                const double room = y.size * (std::fabs(y.value) + std::fabs(gate) + 1);  // an error of either, times the other
                require(is_close(gated[at], gate * y.value, 5e-5, room), "a wrong gated product", where);
            }
    }
}

}  // namespace

void check_products(Pool& pool, const FormatShape& shape) {
    const Matrix matrix(shape, 35, shape.columns == 2 ? 23 : 3);
    const std::string where = std::string(pool.kernels().name) + " format " + std::to_string(shape.format);
    const std::vector<uint8_t> repacked = matrix.repacked(pool);
    check_unpacked(pool, matrix, repacked, where);
    for (const bool is_exact : {false, true}) check_multiply(pool, matrix, repacked.data(), shape.format, is_exact, where);
}

// Weights that are not repacked.
void check_rows_of_files(Pool& pool) {
    const FormatShape shape{kQ8_0, 32, 34, {0}};
    const std::string where = std::string(pool.kernels().name) + " rows of a file";
    const Matrix matrix(shape, 48, 19);  // more than a panel's columns
    for (const bool is_exact : {false, true}) check_multiply(pool, matrix, matrix.bytes.data(), kQ8_0Rows, is_exact, where);
    for (const int64_t n_blocks : {3, 301, 903}) {  // less than a tile; many tiles; too many for scratch memory
        const Matrix other(shape, 48, n_blocks);
        check_multiply(pool, other, other.bytes.data(), kQ8_0Rows, false, where + " of " + std::to_string(n_blocks) + " blocks");
    }
}

}  // namespace motley
