// A barrier for threads that meet thousands of times a second: spin, then let others run, then sleep.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
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

constexpr int kSpins = 2000;  // about 100 µs

// A sleeper needs 50 µs to wake up, and 2 ms where a virtual machine's core has gone idle: more than a whole step of a small
// model. Others come sooner than this, and the next step does, so whoever waits stays awake; but it yields, as it may be
// in the way of the one it waits for.
constexpr auto kStayAwake = std::chrono::milliseconds(5);

// Returns once `word` is no longer `old`.
inline void await_change(std::atomic<uint32_t>& word, uint32_t old) {
    for (int i = 0; i < kSpins; i++) {
        if (word.load(std::memory_order_acquire) != old) return;
        relax();
    }
    const auto end = std::chrono::steady_clock::now() + kStayAwake;
    while (std::chrono::steady_clock::now() < end) {
        if (word.load(std::memory_order_acquire) != old) return;
        std::this_thread::yield();
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
