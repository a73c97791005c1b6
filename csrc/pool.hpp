// A thread pool whose threads run each call together. The calling thread is one of them.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "attendance.hpp"
#include "barrier.hpp"
#include "kernels.hpp"
#if defined(__linux__)
#include <sched.h>
#endif

namespace motley {

// Binds the calling thread to a core during the object's lifetime (negative: no binding). A permanent binding would be
// inherited by every thread that the caller starts later.
class CoreBinding {
public:
    explicit CoreBinding(int core);
    ~CoreBinding();
    CoreBinding(const CoreBinding&) = delete;
    CoreBinding& operator=(const CoreBinding&) = delete;

private:
    bool is_bound_ = false;
#if defined(__linux__)
    cpu_set_t before_;
#endif
};

// If other programs use the cores, some of the pool's threads do not take part, see attendance.hpp.
class Pool {
public:
    // One thread's work in a call, from `position` on (0, or where it joined). Returns false if `rendezvous` dismissed it.
    using Work = std::function<bool(int thread, int64_t position)>;

    // `cores`: the core of each thread, the caller's included. Empty: threads are not bound to cores.
    Pool(int n_threads, const std::string& instruction_set, std::vector<int> cores, AttendanceLimits limits = {});
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // Binds the calling thread to the pool's first core, if it has cores, until the result is destroyed.
    CoreBinding bind_caller() const { return CoreBinding(cores_.empty() ? -1 : cores_[0]); }

    // Runs `work` on all threads that take part; returns when all are done. Only one caller at a time.
    void run(const Work& work);

    // Runs one kernel call on all threads.
    template <class Args>
    void run_kernel(void (*kernel)(const Args&, const Worker&), const Args& args) {
        std::atomic<int64_t> next{0};
        run([&](int thread, int64_t) {
            kernel(args, worker(thread, &next));
            return true;
        });
    }

    // The worker of a thread. Its number is its rank among the threads that take part.
    Worker worker(int thread, std::atomic<int64_t>* next) const {
        return {states_[thread].rank, attendance_.n_present(), next, scratch_[thread].get()};
    }

    // Barrier of all threads that take part in a call; threads that join here begin at `position`. False: this thread
    // is dismissed and must return from its work; the call continues without it.
    bool rendezvous(int thread, int64_t position);

    // Measures the threads' losses to other programs for `duration` nanoseconds, also without a long wait before.
    void measure_for(int64_t duration) { measure_until_.store(now_ns() + duration, std::memory_order_relaxed); }

    int n_threads() const { return n_threads_; }
    int n_present() const { return attendance_.n_present(); }
    ReadPattern patterns[kNumFormats];  // by format; used by programs created later
    const Kernels& kernels() const { return kernels_; }

private:
    // State of one thread, on its own cache line.
    struct alignas(64) ThreadState {
        std::atomic<uint32_t> n_calls{0};       // calls to take part
        std::atomic<uint32_t> n_dismissals{0};  // dismissals from a call, at a barrier
        uint32_t n_dismissals_seen = 0;
        int rank = 0;
        bool is_measured = false;  // measured since `start` and `cpu_start`
        int64_t start = 0, cpu_start = 0;
    };
    void serve(int thread);
    void call(int thread);
    void assign_ranks();
    bool is_measuring() const { return measure_until_.load(std::memory_order_relaxed) != 0; }
    void start_measuring(int thread, int64_t start);
    void measure(int thread, int64_t min_wall);
    std::optional<int> review(int64_t position);
    template <class OnLast>
    void wait_at_barrier(int thread, int64_t min_wall, OnLast&& on_last);

    struct Free { void operator()(uint8_t* p) const; };
    const Kernels& kernels_;
    const int n_threads_;
    const std::vector<int> cores_;
    std::vector<std::unique_ptr<uint8_t[], Free>> scratch_;
    std::vector<ThreadState> states_;
    Attendance attendance_;
    Barrier barrier_;
    const Work* work_ = nullptr;
    int64_t position_ = 0;                    // where called threads begin
    int64_t called_at_ = 0;
    std::atomic<int64_t> measure_until_{0};  // 0: losses are not measured
    std::atomic<bool> is_closing_{false};
    std::vector<std::thread> threads_;
};

}  // namespace motley
