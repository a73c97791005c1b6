// Where the programs of several devices of one process meet: each shows its buffer, all read everybody's.
#pragma once
#include <memory>
#include <vector>

#include "barrier.hpp"

namespace motley {

class Group {
public:
    explicit Group(int n_devices) : barrier_(n_devices), parts_(n_devices, nullptr) {}

    // False if another device has failed.
    bool show(int device, const float* part) {
        parts_[device] = part;
        return barrier_.arrive_and_wait();
    }
    bool leave() { return barrier_.arrive_and_wait(); }
    const float* part(int device) const { return parts_[device]; }
    int n_devices() const { return static_cast<int>(parts_.size()); }
    void abort() { barrier_.abort(); }
    void reset() { barrier_.reset(); }

private:
    Barrier barrier_;
    std::vector<const float*> parts_;
};

}  // namespace motley
