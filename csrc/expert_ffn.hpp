// The FFN of chosen experts as steps of a program (kernels/experts.cpp), and the layout of their buffer.
#pragma once
#include <array>
#include <tuple>
#include <vector>

#include "addresses.hpp"
#include "program.hpp"

namespace motley {

// Offsets from the beginning of the buffer, in bytes; one row for each (token, expert).
struct ExpertRoom {
    int64_t bounds, place_of, id_at, next;  // see ExpertPlaces
    int64_t values, codes;                  // the rows of x
    int64_t hidden, hidden_codes;
    int64_t rows;  // each expert's results
    int64_t size = 0;

    ExpertRoom(int64_t n_tokens, int64_t k, int64_t n_columns, int64_t n_hidden, int64_t n_experts) {
        const int64_t n_rows = n_tokens * k;
        bounds = take(4 * (n_experts + 1));
        place_of = take(4 * n_rows);
        id_at = take(4 * n_rows);
        next = take(8 * 2 * n_experts);
        values = take(4 * n_rows * n_columns);
        codes = take(quantized_bytes(n_rows, n_columns));
        hidden = take(4 * n_rows * n_hidden);
        hidden_codes = take(quantized_bytes(n_rows, n_hidden));
        rows = values;  // not read any more when the results are written
    }

private:
    int64_t take(int64_t bytes) {
        const int64_t start = size;
        size += aligned(bytes);
        return start;
    }
};

// (weight, format, rows, bias, bytes from one expert to the next)
using ExpertTuple = std::tuple<Address, int, int64_t, Address, int64_t>;

struct ExpertFfn {
    Address x, quantized;  // quantized: 0 if products take floats
    int64_t n_tokens, n_columns;
    Address ids, weights;  // (tokens, k)
    int64_t k, n_experts;
    std::array<ExpertTuple, 3> parts;  // gate, up, down
    int gate;
    Address residual, out;  // residual: 0 for none
    Address room;
    bool takes_values, takes_codes_of_hidden, is_exact;

    void add_to(Program& p) const {
        const int64_t n_rows = n_tokens * k, n_hidden = std::get<2>(parts[0]);
        const ExpertRoom r(n_tokens, k, n_columns, n_hidden, n_experts);
        const ExpertPlaces places{at<int32_t>(room + r.bounds), at<int32_t>(room + r.place_of), at<int32_t>(room + r.id_at),
                                  at<std::atomic<int64_t>>(room + r.next), n_experts};
        const double per_row = n_tokens < 2 ? 0 : 0.1 * n_rows;
        p.add_kernel(p.kernels().expert_group, ExpertGroupArgs{at<int32_t>(ids), n_rows, places}, 0);
        const Rows own = rows_at(x, n_columns, quantized, n_tokens, n_columns);
        const Rows placed = rows_at(takes_values ? room + r.values : 0, n_columns, quantized ? room + r.codes : 0, n_rows, n_columns);
        p.add_kernel(p.kernels().expert_gather, ExpertGatherArgs{own, placed, n_columns, k, places}, per_row * n_columns);
        add_product(p, placed, n_columns, {0, 1}, gate, room + r.hidden, 0, places);
        const Rows hidden = rows_at(room + r.hidden, n_hidden, takes_codes_of_hidden ? room + r.hidden_codes : 0, n_rows, n_hidden);
        if (takes_codes_of_hidden)
            p.add_kernel(p.kernels().quantize, QuantizeArgs{hidden, n_rows, n_hidden}, 2 * per_row * n_hidden);
        add_product(p, hidden, n_hidden, {2}, kNoFunction, room + r.rows, 1, places);
        p.add_kernel(p.kernels().expert_sum,
                     ExpertSumArgs{at(room + r.rows), at(weights), at(residual), at(out), n_tokens, n_columns, k, places},
                     per_row * n_columns);
    }

private:
    void add_product(Program& p, const Rows& rows, int64_t columns, const std::vector<int>& which, int function, Address target,
                     int pass, const ExpertPlaces& places) const {
        ExpertMatMulArgs args{{rows, n_tokens * k, columns, 0, {}, function, is_exact}, {}, pass, places};
        double n_products = 0;
        for (int i : which) {
            const auto& [weight, format, n, bias, distance] = parts[i];
            args.weight_stride[args.product.n_parts] = distance;
            args.product.parts[args.product.n_parts++] = {at<uint8_t>(weight), format, n, at(bias), nullptr, at(target), n, p.pattern(format)};
            n_products += 1.0 * n * columns * n_tokens * k;
        }
        p.add_kernel(p.kernels().expert_matmul, args, n_products / 16);
    }
};

}  // namespace motley
