// Threads that wait for work and do it together. The caller is one of them.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "barrier.hpp"
#include "kernels.hpp"
#if defined(__linux__)
#include <sched.h>
#endif

namespace motley {

// Keeps the calling thread on a core for as long as it lives (negative: lets it be). Programs that bind their caller for
// good would also bind every thread that it starts later.
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

class Pool {
public:
    // `cores`: the one that each thread is bound to, the caller's included; empty: wherever the system puts them.
    Pool(int n_threads, const std::string& instruction_set, std::vector<int> cores);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // The calling thread stays on the pool's first core, if it has cores, until the result goes.
    CoreBinding bind_caller() const { return CoreBinding(cores_.empty() ? -1 : cores_[0]); }

    // work(thread) on all threads at once; returns when all are done. Not for two callers at a time.
    void run(const std::function<void(int)>& work);

    // One kernel call, by all threads.
    template <class Args>
    void run_kernel(void (*kernel)(const Args&, const Worker&), const Args& args) {
        std::atomic<int64_t> next{0};
        run([&](int thread) { kernel(args, worker(thread, &next)); });
    }

    Worker worker(int thread, std::atomic<int64_t>* next) const {
        return {thread, n_threads_, next, scratch_[thread].get()};
    }
    void meet() {
        if (n_threads_ > 1) barrier_.arrive_and_wait();
    }
    int n_threads() const { return n_threads_; }
    const Kernels& kernels() const { return kernels_; }

private:
    void serve(int thread);

    struct Free { void operator()(uint8_t* p) const; };
    const Kernels& kernels_;
    const int n_threads_;
    const std::vector<int> cores_;
    std::vector<std::unique_ptr<uint8_t[], Free>> scratch_;
    Barrier barrier_;
    const std::function<void(int)>* work_ = nullptr;
    std::atomic<uint32_t> n_calls_{0};
    std::atomic<bool> is_closing_{false};
    std::vector<std::thread> threads_;
};

}  // namespace motley
