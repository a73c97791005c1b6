// One token for each of the same sequences, in step after step: what stays the same is kept here, so that Python's part of
// such a step is one call.
#pragma once
#include <algorithm>
#include <utility>

#include "batch.hpp"
#include "sampling.hpp"
#include "team.hpp"

namespace motley {

// An input of a program whose numbers are the same in every step.
struct FixedInput {
    int32_t* target;
    std::vector<int32_t> numbers;
};

// One device's program and where it looks for its inputs. The caller keeps all of it alive.
struct SteadyDevice {
    Program* program;
    int64_t n_tokens, n_outputs;          // see Program::set_batch
    int32_t *tokens, *positions;          // (sequences,), may be null
    std::vector<FixedInput> others;
    std::vector<std::pair<size_t, Batch*>> slots;  // group of cache layers, and where kernels look for its batch
};

class SteadyBatch {
public:
    // `samplers`: of each row of `logits`; none: tokens are chosen by the caller.
    SteadyBatch(std::vector<SteadyDevice> devices, size_t n_rows, size_t n_groups, const float* logits, int64_t n_columns,
                std::vector<const RowSampler*> samplers)
        : devices_(std::move(devices)), n_rows_(n_rows), tables_(n_groups), logits_(logits), n_columns_(n_columns),
          samplers_(std::move(samplers)) {
        if (devices_.empty() || !n_rows || (!samplers_.empty() && (samplers_.size() != n_rows || n_columns < 1)))
            throw std::invalid_argument("a sampler for each row, or none");
        for (const SteadyDevice& device : devices_) {
            programs_.push_back(device.program);
            for (const auto& [group, slot] : device.slots)
                if (group >= n_groups || !slot) throw std::invalid_argument("no such group of cache layers");
        }
    }

    // The block tables of a group: set before the first run, and again when they have changed. Positions are those of `run`.
    Batch& tables(size_t group) {
        if (group >= tables_.size()) throw std::invalid_argument("no such group of cache layers");
        return tables_[group];
    }

    // Computes `tokens`, one of each sequence, at `positions`, and chooses the tokens that follow; `indexes`: theirs in
    // their answers. These are the next round's tokens, and so on; block tables must reach as far as the last round. The
    // round that chooses one of `stops`, or no token for a row (see sampling.hpp), is the last. Other batches may have run
    // in between. Returns the tokens of each round, none if there are no samplers.
    std::vector<std::vector<int32_t>> run(Team& team, std::vector<int32_t> tokens, std::vector<int32_t> positions,
                                          std::vector<int64_t> indexes, int n_rounds, const std::vector<int32_t>& stops) {
        if (tokens.size() != n_rows_ || positions.size() != n_rows_ || (!samplers_.empty() && indexes.size() != n_rows_))
            throw std::invalid_argument("a token, a position and an index for each row");
        std::vector<std::vector<int32_t>> rounds;
        for (int round = 0;; round++) {
            compute(team, tokens, positions);
            if (samplers_.empty()) return rounds;
            std::vector<int32_t>& chosen = rounds.emplace_back(n_rows_);
            choose_tokens(logits_, static_cast<int64_t>(n_rows_), n_columns_, samplers_.data(), indexes.data(), chosen.data(),
                          &programs_[0]->pool());
            const bool is_last = std::any_of(chosen.begin(), chosen.end(), [&](int32_t token) {
                return token < 0 || std::find(stops.begin(), stops.end(), token) != stops.end();
            });
            if (is_last || round + 1 >= n_rounds) return rounds;
            tokens = chosen;
            for (int32_t& position : positions) position++;
            for (int64_t& index : indexes) index++;
        }
    }

private:
    void compute(Team& team, const std::vector<int32_t>& tokens, const std::vector<int32_t>& positions) {
        for (Batch& batch : tables_) batch.move_to(positions);
        for (const SteadyDevice& device : devices_) {
            device.program->set_batch(device.n_tokens, device.n_outputs);
            if (device.tokens) std::copy(tokens.begin(), tokens.end(), device.tokens);
            if (device.positions) std::copy(positions.begin(), positions.end(), device.positions);
            for (const FixedInput& input : device.others) std::copy(input.numbers.begin(), input.numbers.end(), input.target);
            for (const auto& [group, slot] : device.slots) slot->view = tables_[group].view;
        }
        team.run(programs_);
    }

    const std::vector<SteadyDevice> devices_;
    const size_t n_rows_;
    std::vector<Batch> tables_;  // by group
    const float* const logits_;
    const int64_t n_columns_;
    const std::vector<const RowSampler*> samplers_;
    std::vector<Program*> programs_;
};

}  // namespace motley
