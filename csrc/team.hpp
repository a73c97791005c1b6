// Programs of several devices, started together by one call: one thread for each device, where the first one is
// the caller's thread. In collectives (group.hpp) programs wait for each other, so all of them must run concurrently.
#pragma once
#include <exception>
#include <thread>
#include <vector>

#include "barrier.hpp"
#include "program.hpp"

namespace motley {

class Team {
public:
    explicit Team(int n_devices) : errors_(n_devices), barrier_(n_devices) {
        for (int device = 1; device < n_devices; device++) threads_.emplace_back([this, device] { serve(device); });
    }
    ~Team() {
        is_closing_.store(true, std::memory_order_release);
        call();
        for (auto& thread : threads_) thread.join();
    }
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    // Runs programs[device] on each device; returns when all are done. Only one caller at a time.
    void run(const std::vector<Program*>& programs) {
        programs_ = programs.data();
        if (!threads_.empty()) call();
        run_one(0);
        barrier_.arrive_and_wait();
        for (auto& error : errors_)
            if (error) std::rethrow_exception(error);
    }

private:
    void call() {
        n_calls_.fetch_add(1, std::memory_order_acq_rel);
        n_calls_.notify_all();
    }
    void run_one(int device) {
        errors_[device] = nullptr;
        try {
            programs_[device]->run_batch();
        } catch (...) {
            errors_[device] = std::current_exception();
        }
    }
    void serve(int device) {
        for (uint32_t n_seen = 0;;) {
            await_change(n_calls_, n_seen);
            n_seen++;
            if (is_closing_.load(std::memory_order_acquire)) return;
            run_one(device);
            barrier_.arrive_and_wait();
        }
    }

    Program* const* programs_ = nullptr;
    std::vector<std::exception_ptr> errors_;
    Barrier barrier_;
    std::atomic<uint32_t> n_calls_{0};
    std::atomic<bool> is_closing_{false};
    std::vector<std::thread> threads_;
};

}  // namespace motley
