// A barrier for threads that meet thousands of times a second: spin for a while, then sleep.
#pragma once
#include <atomic>
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace motley {

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// About 100 µs: within a step, whoever is later than that has lost its core, perhaps to those who wait for it.
constexpr int kSpinsInStep = 2000;

// About 1 ms: the next step of a small model comes sooner, and to be woken up would take as long as the step itself: 50 µs,
// but 2 ms where a virtual machine's core has gone idle.
constexpr int kSpinsBetweenSteps = 20000;

// Returns once `word` is no longer `old`.
inline void await_change(std::atomic<uint32_t>& word, uint32_t old, int n_spins = kSpinsInStep) {
    for (int i = 0; i < n_spins; i++) {
        if (word.load(std::memory_order_acquire) != old) return;
        relax();
    }
    word.wait(old, std::memory_order_acquire);
}

class Barrier {
public:
    explicit Barrier(int n_threads) : n_threads_(n_threads) {}

    // False if it was aborted: somebody will never come.
    bool arrive_and_wait() {
        const uint32_t phase = phase_.load(std::memory_order_acquire);
        if (n_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == n_threads_) {
            n_arrived_.store(0, std::memory_order_relaxed);
            phase_.fetch_add(1, std::memory_order_acq_rel);
            phase_.notify_all();
        } else if (!is_aborted_.load(std::memory_order_acquire)) {
            await_change(phase_, phase);
        }
        return !is_aborted_.load(std::memory_order_acquire);
    }

    void abort() {
        is_aborted_.store(true, std::memory_order_release);
        phase_.fetch_add(1, std::memory_order_acq_rel);
        phase_.notify_all();
    }

    // When nobody is at the barrier.
    void reset() {
        n_arrived_.store(0);
        is_aborted_.store(false);
    }

private:
    const int n_threads_;
    std::atomic<int> n_arrived_{0};
    std::atomic<uint32_t> phase_{0};
    std::atomic<bool> is_aborted_{false};
};

}  // namespace motley
