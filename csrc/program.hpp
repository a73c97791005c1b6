// A device plan as a flat list of kernel calls, run by all threads of a pool in one call.
//
// Steps that are too small to share run on the first thread, and there are barriers only next to shared steps:
// a tiny model needs no barrier.
#pragma once
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "group.hpp"
#include "pool.hpp"
#include "row_counts.hpp"
#include "tagged.hpp"

namespace motley {

struct Aborted : std::runtime_error {
    Aborted() : std::runtime_error("another device of the group has failed") {}
};

class Program {
public:
    explicit Program(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}

    using Step = std::function<void(const Worker&)>;

    // `work`: estimated nanoseconds on one thread.
    void add(Step step, double work);

    template <class Args>
    void add_kernel(void (*kernel)(const Args&, const Worker&), const Args& args, double work) {
        add([this, kernel, args, rows = rows_](const Worker& worker) {
            if (n_rows(rows) == rows.n_planned) return kernel(args, worker);
            Args fewer = args;
            take_rows(fewer, n_rows(rows), rows.n_planned);
            kernel(fewer, worker);
        }, work);
    }

    // Sets the kind of rows for kernels that are added after this call, and the planned number of these rows.
    void set_rows(int kind, int64_t n_planned) {
        if (kind < kAllRows || kind >= kNumRowKinds || n_planned < 1) throw std::invalid_argument("no such rows");
        rows_ = {kind, n_planned};
    }

    // Sums all devices' `x` of n values, in the order of devices, into `out` on every device.
    void add_all_reduce(std::shared_ptr<Group> group, int device, const float* x, float* out, int64_t n);

    // Copies pieces from the devices' `x`; `source` of a piece is an offset into its device's `x`. `counts`: the number of
    // values of each device's `x`; a local group does not need them.
    struct Piece {
        int device;
        int64_t offset;
        CopyArgs copy;
    };
    void add_exchange(std::shared_ptr<Group> group, int device, const float* x, std::vector<Piece> pieces,
                      std::vector<int64_t> counts = {});

    void add_send(std::shared_ptr<Group> group, int device, int target, const float* x, int64_t n) {
        add_rendezvous([=] { return group->send(device, target, x, n); });
    }
    void add_receive(std::shared_ptr<Group> group, int device, int source, float* out, int64_t n = -1);

    // The same with a device that takes part by itself (tagged.hpp). Messages have all planned rows: `place` is a message's,
    // `n` its values. The run's first step `advance`s.
    void add_advance(std::shared_ptr<TaggedMemory> memory) {
        add_rendezvous([=] { return memory->advance(), true; });
    }
    void add_post(std::shared_ptr<TaggedMemory> memory, int64_t place, const float* x, int64_t n) {
        add_rendezvous([=] { return memory->post(place, x, n), true; });
    }
    void add_await(std::shared_ptr<TaggedMemory> memory, int64_t place, float* out, int64_t n, const float* addend) {
        add_rendezvous([=] { return memory->await(place, out, n, addend); });
    }
    // Copies pieces from this device's `x` and from the other one's message.
    void add_tagged_pieces(std::shared_ptr<TaggedMemory> memory, int64_t place, int64_t n, int device, const float* x,
                           std::vector<Piece> pieces);

    // Runs a batch with these numbers of tokens and outputs, at most the planned ones; -1: the planned ones. Throws
    // Aborted if another device of a group has failed.
    void run(int64_t n_tokens = -1, int64_t n_outputs = -1);

    // Sets the batch's sizes for programs that are started together (team.hpp).
    void set_batch(int64_t n_tokens, int64_t n_outputs) {
        n_actual_[kTokenRows] = n_tokens;
        n_actual_[kOutputRows] = n_outputs;
    }
    void run_batch();

    int n_steps() const { return static_cast<int>(steps_.size()); }
    Pool& pool() const { return *pool_; }
    const Kernels& kernels() const { return pool_->kernels(); }
    const ReadPattern& pattern(int format) const { return pool_->patterns[format]; }

private:
    struct Entry {
        Step step;
        bool is_shared;
        std::unique_ptr<std::atomic<int64_t>> next;
    };
    bool run_thread(int thread, size_t first);
    void add_rendezvous(std::function<bool()> rendezvous);

    int64_t n_rows(const RowCount& rows) const {
        return rows.kind == kAllRows || n_actual_[rows.kind] < 0 ? rows.n_planned : n_actual_[rows.kind];
    }

    std::shared_ptr<Pool> pool_;
    RowCount rows_;
    int64_t n_actual_[kNumRowKinds] = {-1, -1, -1};  // rows of the running batch
    std::vector<Entry> steps_;
    std::atomic<bool> has_failed_{false};
};

}  // namespace motley
