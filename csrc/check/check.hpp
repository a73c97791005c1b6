// Common code of the checks. A check that fails prints what failed and where, and ends the program.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "../pool.hpp"

namespace motley {

inline std::mt19937 rng(1);

inline std::vector<float> random_floats(size_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> values(n);
    for (auto& v : values) v = normal(rng);
    return values;
}

inline void require(bool condition, const char* what, const std::string& where) {
    if (condition) return;
    std::fprintf(stderr, "%s: %s\n", where.c_str(), what);
    std::exit(1);
}

// `size`: magnitude of the terms that the values are computed from, if it is larger than the values.
inline bool is_close(double a, double b, double tolerance, double size = 0) {
    return std::fabs(a - b) <= tolerance * (1 + std::fabs(b) + std::fabs(size));
}

struct FormatShape {
    int format, columns, bytes;
    std::vector<int> halves;  // where a block's float16 values are; plain formats: none
    int exponent_at = -1;     // where a block's exponent is: a byte e for 2^(e - 128)
};
extern const std::vector<FormatShape> kFormats;

// Rows of activations in the form that products read.
struct Quantized {
    std::vector<int8_t> codes;
    std::vector<float> scales, sums, half_sums;
    std::vector<int32_t> code_sums;
    Quantized(int64_t rows, int64_t columns)
        : codes(rows * columns), scales(rows * columns / 32), sums(rows * columns / 32), half_sums(rows * columns / 16), code_sums(rows * columns / 16) {}
    Rows view(const std::vector<float>& x, int64_t columns) {
        return {x.data(), columns, codes.data(), scales.data(), sums.data(), half_sums.data(), code_sums.data()};
    }
};

// A matrix of random bytes; only its floating-point numbers are kept in an ordinary range.
struct Matrix {
    const FormatShape& shape;
    int64_t n_rows, n_columns, row_bytes;
    std::vector<uint8_t> bytes;

    Matrix(const FormatShape& form, int64_t rows, int64_t n_blocks);
    double at(int64_t row, int64_t column) const;
    std::vector<uint8_t> repacked(Pool& pool) const;
};

void check_products(Pool& pool, const FormatShape& shape);
void check_rows_of_files(Pool& pool);
void check_attention(Pool& pool, int kind, int64_t block_size, bool has_sinks);
void check_widest_heads(Pool& pool, int kind);
void check_values(Pool& pool);
void check_long_rows(Pool& pool);
void check_experts(Pool& pool);
void check_recurrent(Pool& pool);
void check_attendance();
void check_changing_threads();
void check_group();

}  // namespace motley
