// Where a batch reads and writes in one group of cache layers.
#pragma once
#include <deque>
#include <stdexcept>
#include <vector>

#include "kernels.hpp"

namespace motley {

// Programs keep a reference to it; each run sets its contents.
class Batch {
public:
    BatchView view{};

    void clear(int64_t block_size) {
        if (block_size < 1) throw std::invalid_argument("no such block size");
        block_size_ = block_size;
        sequences_.clear();
        starts_.assign(1, 0);
        blocks_.clear();
        trees_.clear();
    }

    // Adds a sequence, whose block ids have been appended to the result of `blocks` since the last call.
    void add(int64_t first_token, int64_t n_tokens, int64_t position, int64_t first) {
        sequences_.push_back({first_token, n_tokens, position, first, nullptr, nullptr});
        starts_.push_back(blocks_.size());
    }
    std::vector<int32_t>& blocks() { return blocks_; }

    // Finds the slots of all rows, after the last sequence was added.
    void finish() {
        slots_.clear();
        for (size_t i = 0; i < sequences_.size(); i++) {
            SequenceView& sequence = sequences_[i];
            sequence.blocks = blocks_.data() + starts_[i];
            const int64_t start = sequence.position - sequence.first, stop = start + sequence.n_tokens;
            if (start < 0 || stop > static_cast<int64_t>(starts_[i + 1] - starts_[i]) * block_size_)
                throw std::invalid_argument("tokens outside of their sequence's blocks");
            for (int64_t key = start; key < stop; key++)
                slots_.push_back(sequence.blocks[key / block_size_] * block_size_ + key % block_size_);
        }
        view = {slots_.data(), sequences_.data(), static_cast<int64_t>(sequences_.size())};
    }

    // The rows of a sequence are a tree: for each the rows that it sees, see SequenceView. Holds until `clear`.
    void set_tree(size_t sequence, const std::vector<uint64_t>& seen) {
        if (sequence >= sequences_.size()) throw std::invalid_argument("no such sequence");
        SequenceView& view = sequences_[sequence];
        if (view.n_tokens > kMaxTreeRows || view.n_tokens != static_cast<int64_t>(seen.size()))
            throw std::invalid_argument("a tree has one mask for each row, and at most 64 rows");
        for (size_t i = 0; i < seen.size(); i++)  // it sees itself, and no later row
            if (seen[i] >> i != 1) throw std::invalid_argument("the masks are not those of a tree");
        view.seen = trees_.emplace_back(seen).data();
    }

    // Gives each sequence so many rows from a position on; its blocks must reach so far.
    void move_to(const std::vector<int32_t>& positions, const std::vector<int32_t>& counts) {
        if (positions.size() != sequences_.size() || counts.size() != sequences_.size())
            throw std::invalid_argument("a position and a number of rows for each sequence");
        int64_t first = 0;
        for (size_t i = 0; i < positions.size(); first += counts[i++]) {
            sequences_[i].first_token = first;
            sequences_[i].n_tokens = counts[i];
            sequences_[i].position = positions[i];
        }
        finish();
    }

    // Moves all sequences on by one token; their blocks must reach so far.
    void advance() {
        for (SequenceView& sequence : sequences_) sequence.position++;
        finish();
    }

private:
    int64_t block_size_ = 1;
    std::vector<SequenceView> sequences_;
    std::vector<size_t> starts_;  // of each sequence's blocks, and the end of the last one's
    std::vector<int32_t> blocks_;
    std::vector<int64_t> slots_;
    std::deque<std::vector<uint64_t>> trees_;  // their addresses stay the same
};

}  // namespace motley
