#include "pool.hpp"

#include <cstdlib>
#include <new>
#include <stdexcept>
#if defined(__linux__)
#include <pthread.h>
#endif

#include "dispatch.hpp"

namespace motley {
namespace {

void bind_to_core(int core) {
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
    (void)core;
#endif
}

}  // namespace

CoreBinding::CoreBinding([[maybe_unused]] int core) {
#if defined(__linux__)
    if (core < 0 || pthread_getaffinity_np(pthread_self(), sizeof before_, &before_)) return;
    bind_to_core(core);
    is_bound_ = true;
#endif
}

CoreBinding::~CoreBinding() {
#if defined(__linux__)
    if (is_bound_) pthread_setaffinity_np(pthread_self(), sizeof before_, &before_);
#endif
}

void Pool::Free::operator()(uint8_t* p) const { std::free(p); }

Pool::Pool(int n_threads, const std::string& instruction_set, std::vector<int> cores)
    : kernels_(kernels_for(instruction_set)), n_threads_(n_threads), cores_(std::move(cores)), barrier_(n_threads) {
    if (n_threads < 1) throw std::invalid_argument("a pool needs at least one thread");
    for (int t = 0; t < n_threads; t++) {
        auto* memory = static_cast<uint8_t*>(std::aligned_alloc(64, kScratchBytes));
        if (!memory) throw std::bad_alloc();
        scratch_.emplace_back(memory);
    }
    for (int t = 1; t < n_threads; t++) threads_.emplace_back([this, t] { serve(t); });
}

Pool::~Pool() {
    is_closing_.store(true, std::memory_order_release);
    n_calls_.fetch_add(1, std::memory_order_acq_rel);
    n_calls_.notify_all();
    for (auto& thread : threads_) thread.join();
}

void Pool::run(const std::function<void(int)>& work) {
    const CoreBinding binding = bind_caller();
    if (n_threads_ > 1) {
        work_ = &work;
        n_calls_.fetch_add(1, std::memory_order_acq_rel);
        n_calls_.notify_all();
    }
    work(0);
    meet();
}

void Pool::serve(int thread) {
    if (thread < static_cast<int>(cores_.size())) bind_to_core(cores_[thread]);
    for (uint32_t n_seen = 0;;) {
        await_change(n_calls_, n_seen);
        n_seen++;
        if (is_closing_.load(std::memory_order_acquire)) return;
        (*work_)(thread);
        meet();
    }
}

}  // namespace motley
