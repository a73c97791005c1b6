// Chooses a token from a row of logits: the largest ones, top-p, min-p, temperature, and a draw.
// engine/sampling.py is the specification, and noise.py that of the random numbers.
#pragma once
#include <cstdint>

#include "pool.hpp"

namespace motley {

// A request's sampling parameters; temperature 0: the largest logit.
struct RowSampler {
    double temperature;
    int64_t top_k;
    double top_p, min_p;
    uint64_t key;
};

constexpr int64_t kMaxTopK = 1024;
constexpr int32_t kNoneLeft = -1, kNotFinite = -2;  // instead of a token: all logits are -inf; one is inf or NaN

// The token of each row of `logits` (rows, columns). `indexes`: of the tokens in their answers. `pool`: threads that share
// the rows.
void choose_tokens(const float* logits, int64_t n_rows, int64_t n_columns, const RowSampler* const* samplers, const int64_t* indexes,
                   int32_t* tokens, Pool* pool = nullptr);

}  // namespace motley
