// Several tokens for each sequence of a batch without Python in between: a draft of a model that is smaller than Python's
// part of a step.
#pragma once
#include "batch.hpp"
#include "sampling.hpp"
#include "team.hpp"

namespace motley {

// One device's program, for one token of each sequence, and its inputs that change from token to token.
struct DraftProgram {
    Program* program;
    int32_t* tokens;     // (sequences,), may be null
    int32_t* positions;  // the same
    std::vector<Batch*> batches;
};

// Runs programs whose inputs are set, chooses a token for each row of `logits`, makes these the next inputs, and so on.
// Returns the tokens of each round; it ends early if a row has none (see sampling.hpp).
inline std::vector<std::vector<int32_t>> draft_tokens(Team& team, const std::vector<DraftProgram>& devices, const float* logits,
                                                      int64_t n_columns, const std::vector<const RowSampler*>& samplers,
                                                      std::vector<int64_t> indexes, int n_rounds) {
    std::vector<Program*> programs;
    for (const DraftProgram& device : devices) programs.push_back(device.program);
    std::vector<std::vector<int32_t>> rounds;
    const size_t n = samplers.size();
    for (int round = 0;; round++) {
        team.run(programs);
        std::vector<int32_t>& chosen = rounds.emplace_back(n);
        choose_tokens(logits, static_cast<int64_t>(n), n_columns, samplers.data(), indexes.data(), chosen.data(),
                      &programs[0]->pool());
        for (const int32_t token : chosen)
            if (token < 0) return rounds;
        if (round + 1 >= n_rounds) return rounds;
        for (int64_t& index : indexes) index++;
        for (const DraftProgram& device : devices) {
            for (size_t i = 0; device.tokens && i < n; i++) device.tokens[i] = chosen[i];
            for (size_t i = 0; device.positions && i < n; i++) device.positions[i]++;
            for (Batch* batch : device.batches) batch->advance();
        }
    }
}

}  // namespace motley
