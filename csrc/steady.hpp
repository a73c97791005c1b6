// The same sequences in step after step: what stays the same is kept here, so that Python's part of such a step is one call.
// Each sequence has one token in a step, or more: its draft.
#pragma once
#include <algorithm>
#include <numeric>
#include <utility>

#include "batch.hpp"
#include "sampling.hpp"
#include "team.hpp"

namespace motley {

// An input with a number for each row, which is the same for all rows of a sequence.
struct SequenceInput {
    int32_t* target;
    std::vector<int32_t> numbers;  // of each sequence
};

// One device's program and where it looks for its inputs. The caller keeps all of it alive.
struct SteadyDevice {
    Program* program;
    int32_t *tokens, *positions, *output_rows;  // a number for each row; may be null
    std::vector<SequenceInput> others;
    std::vector<std::pair<size_t, Batch*>> slots;  // group of cache layers, and where kernels look for its batch
};

// The programs of all devices for steps of up to `max_rows` rows.
struct SteadyPrograms {
    SteadyPrograms(int64_t max_rows, std::vector<SteadyDevice> devices, const float* logits)
        : max_rows(max_rows), devices(std::move(devices)), logits(logits) {
        for (const SteadyDevice& device : this->devices) programs.push_back(device.program);
    }
    int64_t max_rows;
    std::vector<SteadyDevice> devices;
    const float* logits;
    std::vector<Program*> programs;
};

class SteadyBatch {
public:
    // `samplers`: of each sequence; none: tokens are chosen by the caller. `n_columns`: of the logits.
    SteadyBatch(size_t n_sequences, size_t n_groups, int64_t n_columns, std::vector<const RowSampler*> samplers)
        : n_sequences_(n_sequences), tables_(n_groups), n_columns_(n_columns), samplers_(std::move(samplers)) {
        if (!n_sequences || (!samplers_.empty() && (samplers_.size() != n_sequences || n_columns < 1)))
            throw std::invalid_argument("a sampler for each sequence, or none");
    }

    // Adds programs. A step is computed by those that have room for the fewest rows, and for its own.
    void add(SteadyPrograms programs) {
        if (programs.devices.empty()) throw std::invalid_argument("no devices");
        for (const SteadyDevice& device : programs.devices) {
            for (const auto& [group, slot] : device.slots)
                if (group >= tables_.size() || !slot) throw std::invalid_argument("no such group of cache layers");
            for (const SequenceInput& input : device.others)
                if (input.numbers.size() != n_sequences_) throw std::invalid_argument("a number for each sequence");
        }
        const auto after = [](int64_t n, const SteadyPrograms& other) { return n < other.max_rows; };
        sizes_.insert(std::upper_bound(sizes_.begin(), sizes_.end(), programs.max_rows, after), std::move(programs));
    }

    // The block tables of a group: set before the first run, and again when they have changed. Positions are those of a run.
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
        const std::vector<int32_t> counts(n_sequences_, 1);
        std::vector<std::vector<int32_t>> rounds;
        for (int round = 0;; round++) {
            std::vector<int32_t> chosen = run_rows(team, tokens, counts, positions, indexes);
            if (samplers_.empty()) return rounds;
            const bool is_last = std::any_of(chosen.begin(), chosen.end(), [&](int32_t token) {
                return token < 0 || std::find(stops.begin(), stops.end(), token) != stops.end();
            });
            rounds.push_back(chosen);
            if (is_last || round + 1 >= n_rounds) return rounds;
            tokens = std::move(chosen);
            for (int32_t& position : positions) position++;
            for (int64_t& index : indexes) index++;
        }
    }

    // Computes `counts` tokens of each sequence, from `positions` on, and chooses the token after each of them, as if all
    // before it were right. `indexes`: of each sequence's first chosen token in its answer. No tokens without samplers.
    std::vector<int32_t> run_rows(Team& team, const std::vector<int32_t>& tokens, const std::vector<int32_t>& counts,
                                  const std::vector<int32_t>& positions, const std::vector<int64_t>& indexes) {
        if (counts.size() != n_sequences_ || positions.size() != n_sequences_ || (!samplers_.empty() && indexes.size() != n_sequences_))
            throw std::invalid_argument("a position, a number of rows and an index for each sequence");
        const auto n_rows = static_cast<int64_t>(tokens.size());
        if (std::accumulate(counts.begin(), counts.end(), int64_t{0}) != n_rows || *std::min_element(counts.begin(), counts.end()) < 1)
            throw std::invalid_argument("one token or more for each sequence");
        const SteadyPrograms& size = size_for(n_rows);
        compute(team, size, tokens, counts, positions);
        if (samplers_.empty()) return {};
        row_samplers_.clear();
        row_indexes_.clear();
        for (size_t i = 0; i < n_sequences_; i++)
            for (int32_t row = 0; row < counts[i]; row++) {
                row_samplers_.push_back(samplers_[i]);
                row_indexes_.push_back(indexes[i] + row);
            }
        std::vector<int32_t> chosen(tokens.size());
        choose_tokens(size.logits, n_rows, n_columns_, row_samplers_.data(), row_indexes_.data(), chosen.data(), &size.programs[0]->pool());
        return chosen;
    }

private:
    const SteadyPrograms& size_for(int64_t n_rows) const {
        for (const SteadyPrograms& size : sizes_)
            if (n_rows <= size.max_rows) return size;
        throw std::invalid_argument("no program for so many rows");
    }

    void compute(Team& team, const SteadyPrograms& size, const std::vector<int32_t>& tokens, const std::vector<int32_t>& counts,
                 const std::vector<int32_t>& positions) {
        for (Batch& batch : tables_) batch.move_to(positions, counts);
        const auto n_rows = static_cast<int64_t>(tokens.size());
        for (const SteadyDevice& device : size.devices) {
            device.program->set_batch(n_rows, n_rows);
            if (device.tokens) std::copy(tokens.begin(), tokens.end(), device.tokens);
            if (device.output_rows) std::iota(device.output_rows, device.output_rows + n_rows, 0);
            int64_t first = 0;
            for (size_t i = 0; i < n_sequences_; first += counts[i++]) {
                if (device.positions) std::iota(device.positions + first, device.positions + first + counts[i], positions[i]);
                for (const SequenceInput& input : device.others) std::fill_n(input.target + first, counts[i], input.numbers[i]);
            }
            for (const auto& [group, slot] : device.slots) slot->view = tables_[group].view;
        }
        team.run(size.programs);
    }

    const size_t n_sequences_;
    std::vector<Batch> tables_;  // by group
    const int64_t n_columns_;
    const std::vector<const RowSampler*> samplers_;
    std::vector<SteadyPrograms> sizes_;  // ascending
    std::vector<const RowSampler*> row_samplers_;  // of a run; kept for their memory
    std::vector<int64_t> row_indexes_;
};

}  // namespace motley
