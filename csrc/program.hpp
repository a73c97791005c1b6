// A device plan as a flat list of kernel calls, run by all threads of a pool in one go.
//
// Steps that are too small to share run on the first thread, and threads meet only where a shared step is near:
// a tiny model never waits for a barrier.
#pragma once
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "group.hpp"
#include "pool.hpp"

namespace motley {

struct HungUp : std::runtime_error {
    HungUp() : std::runtime_error("another device of the group has failed") {}
};

class Program {
public:
    explicit Program(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}

    using Step = std::function<void(const Worker&)>;

    // `work`: roughly the nanoseconds that one thread needs.
    void add(Step step, double work);

    template <class Args>
    void add_kernel(void (*kernel)(const Args&, const Worker&), const Args& args, double work) {
        add([kernel, args](const Worker& worker) { kernel(args, worker); }, work);
    }

    // Everybody's `x` of n values, summed in the order of devices into `out` on all of them.
    void add_all_reduce(std::shared_ptr<Group> group, int device, const float* x, float* out, int64_t n);

    // Copies from everybody's `x`; `source` of each is an offset into that device's.
    struct Piece {
        int device;
        int64_t offset;
        CopyArgs copy;
    };
    void add_exchange(std::shared_ptr<Group> group, int device, const float* x, std::vector<Piece> pieces);

    void add_send(std::shared_ptr<Group> group, int device, int target, const float* x, int64_t n) {
        add_meeting([=] { return group->send(device, target, x, n); });
    }
    void add_receive(std::shared_ptr<Group> group, int device, int source, float* out) {
        add_meeting([=] { return group->receive(source, device, out); });
    }

    // Throws HungUp if another device of a group has failed.
    void run();

    int n_steps() const { return static_cast<int>(steps_.size()); }
    const Kernels& kernels() const { return pool_->kernels(); }

private:
    struct Entry {
        Step step;
        bool is_shared;
        std::unique_ptr<std::atomic<int64_t>> next;
    };
    void run_thread(int thread);
    void add_meeting(std::function<bool()> meet);

    std::shared_ptr<Pool> pool_;
    std::vector<Entry> steps_;
    std::atomic<bool> has_failed_{false};
};

}  // namespace motley
