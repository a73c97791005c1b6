// A barrier for threads that synchronize thousands of times a second: spin, then yield, then sleep.
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

// A sleeping thread needs 50 µs to wake up, and 2 ms if a virtual machine's core has gone idle: more than a whole step
// of a small model. The other threads arrive earlier than this, and so does the next step, so a waiting thread stays
// awake. It yields, because it may occupy the core of the thread that it waits for.
constexpr auto kStayAwake = std::chrono::milliseconds(5);

inline int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Waits until `word` is no longer `old`. Returns the nanoseconds after spinning; 0 if spinning was enough. If the
// result is kStayAwake or more, the thread has slept.
inline int64_t await_change(std::atomic<uint32_t>& word, uint32_t old) {
    for (int i = 0; i < kSpins; i++) {
        if (word.load(std::memory_order_acquire) != old) return 0;
        relax();
    }
    const int64_t start = now_ns(), end = start + std::chrono::nanoseconds(kStayAwake).count();
    for (int64_t now; (now = now_ns()) < end;) {
        if (word.load(std::memory_order_acquire) != old) return now - start;
        std::this_thread::yield();
    }
    word.wait(old, std::memory_order_acquire);
    return now_ns() - start;
}

class Barrier {
public:
    explicit Barrier(int n_threads) : n_threads_(n_threads) {}

    // `on_last` runs on the last thread to arrive, before the other threads continue. Returns await_change's
    // nanoseconds; -1 if the barrier was aborted because another thread will never arrive.
    template <class OnLast>
    int64_t arrive_and_wait(OnLast&& on_last) {
        // Read before this thread counts as arrived: after that, other threads may continue and call resize.
        const int n_threads = n_threads_;
        const uint32_t phase = phase_.load(std::memory_order_acquire);
        int64_t waited = 0;
        if (n_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == n_threads) {
            n_arrived_.store(0, std::memory_order_relaxed);
            on_last();
            phase_.fetch_add(1, std::memory_order_acq_rel);
            phase_.notify_all();
        } else if (!is_aborted_.load(std::memory_order_acquire)) {
            waited = await_change(phase_, phase);
        }
        return is_aborted_.load(std::memory_order_acquire) ? -1 : waited;
    }
    // False if it was aborted.
    bool arrive_and_wait() {
        return arrive_and_wait([] {}) >= 0;
    }

    // Sets the number of threads. Call it from `on_last`, or when no thread is at the barrier.
    void resize(int n_threads) { n_threads_ = n_threads; }

    void abort() {
        is_aborted_.store(true, std::memory_order_release);
        phase_.fetch_add(1, std::memory_order_acq_rel);
        phase_.notify_all();
    }

    // Call it only when no thread is at the barrier.
    void reset() {
        n_arrived_.store(0);
        is_aborted_.store(false);
    }

private:
    int n_threads_;
    std::atomic<int> n_arrived_{0};
    std::atomic<uint32_t> phase_{0};
    std::atomic<bool> is_aborted_{false};
};

}  // namespace motley
