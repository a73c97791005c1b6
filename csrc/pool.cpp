#include "pool.hpp"

#include <cstdlib>
#include <new>
#include <stdexcept>
#if defined(__linux__)
#include <pthread.h>
#include <time.h>
#endif

#include "dispatch.hpp"

namespace motley {
namespace {

constexpr int64_t kLongWait = 300'000;       // nanoseconds of a wait that starts the measurement of losses,
constexpr int64_t kMeasureFor = 50'000'000;  // for this duration,
constexpr int64_t kMeasureEvery = 500'000;   // at these intervals
constexpr int64_t kStayAwakeNs = std::chrono::nanoseconds(kStayAwake).count();

// The CPU time of the calling thread, in nanoseconds.
int64_t thread_cpu_ns() {
#if defined(__linux__)
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
#else
    return now_ns();  // not available: losses are always 0
#endif
}

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

Pool::Pool(int n_threads, const std::string& instruction_set, std::vector<int> cores, AttendanceLimits limits)
    : kernels_(kernels_for(instruction_set)), n_threads_(n_threads), cores_(std::move(cores)),
      states_(std::max(n_threads, 0)), attendance_(std::max(n_threads, 0), limits), barrier_(n_threads) {
    if (n_threads < 1) throw std::invalid_argument("a pool needs at least one thread");
    for (int t = 0; t < n_threads; t++) {
        auto* memory = static_cast<uint8_t*>(std::aligned_alloc(64, kScratchBytes));
        if (!memory) throw std::bad_alloc();
        scratch_.emplace_back(memory);
    }
    assign_ranks();
    for (int t = 1; t < n_threads; t++) threads_.emplace_back([this, t] { serve(t); });
}

Pool::~Pool() {
    is_closing_.store(true, std::memory_order_release);
    for (int t = 1; t < n_threads_; t++) call(t);
    for (auto& thread : threads_) thread.join();
}

void Pool::call(int thread) {
    states_[thread].n_calls.fetch_add(1, std::memory_order_acq_rel);
    states_[thread].n_calls.notify_one();
}

void Pool::assign_ranks() {
    int rank = 0;
    for (int t = 0; t < n_threads_; t++)
        if (attendance_.is_present(t)) states_[t].rank = rank++;
    barrier_.resize(rank);
}

void Pool::run(const Work& work) {
    const CoreBinding binding = bind_caller();
    work_ = &work;
    position_ = 0;
    states_[0].is_measured = false;
    called_at_ = is_measuring() ? now_ns() : 0;
    if (called_at_) start_measuring(0, called_at_);
    for (int t = 1; t < n_threads_; t++)
        if (attendance_.is_present(t)) call(t);
    work(0, 0);
    if (attendance_.n_present() > 1) wait_at_barrier(0, 0, [] {});
}

void Pool::serve(int thread) {
    if (thread < static_cast<int>(cores_.size())) bind_to_core(cores_[thread]);
    ThreadState& state = states_[thread];
    bool is_away = false;
    for (uint32_t n_seen = 0;; n_seen++) {
        int64_t waited = kStayAwakeNs;
        if (is_away)
            state.n_calls.wait(n_seen, std::memory_order_acquire);  // sleeps at once: another program uses the core
        else
            waited = await_change(state.n_calls, n_seen);
        if (is_closing_.load(std::memory_order_acquire)) return;
        state.n_dismissals_seen = state.n_dismissals.load(std::memory_order_relaxed);
        state.is_measured = false;
        // If the thread is late without having slept, another program used its core. The time to wake up does not
        // count.
        if (is_measuring()) start_measuring(thread, waited < kStayAwakeNs && called_at_ ? called_at_ : now_ns());
        is_away = !(*work_)(thread, position_);
        if (!is_away) wait_at_barrier(thread, 0, [] {});
    }
}

bool Pool::rendezvous(int thread, int64_t position) {
    if (n_threads_ == 1) return true;
    if (attendance_.n_present() == 1) {
        if (attendance_.is_trial_due(now_ns()))
            if (const auto back = review(position)) call(*back);
        return true;
    }
    std::optional<int> back;
    wait_at_barrier(thread, kMeasureEvery, [&] {
        if (is_measuring() || attendance_.n_present() < n_threads_) back = review(position);
    });
    // Not earlier: a thread that is called before the others continue could reach the next barrier before this one is
    // over, and would take the end of this one for the end of the next.
    if (back) call(*back);
    // Compares counts, because a late thread may already have been called again.
    return states_[thread].n_dismissals.load(std::memory_order_relaxed) == states_[thread].n_dismissals_seen;
}

template <class OnLast>
void Pool::wait_at_barrier(int thread, int64_t min_wall, OnLast&& on_last) {
    if (is_measuring()) measure(thread, min_wall);
    const int64_t waited = barrier_.arrive_and_wait(on_last);
    if (waited < kLongWait) return;
    const int64_t now = now_ns();
    measure_for(kMeasureFor);
    if (waited >= kStayAwakeNs) start_measuring(thread, now);  // time asleep is no loss
}

void Pool::start_measuring(int thread, int64_t start) {
    ThreadState& state = states_[thread];
    state.is_measured = true;
    state.start = start;
    state.cpu_start = thread_cpu_ns();
}

// Reports the loss since the last report, if that is at least `min_wall` ago: reading the CPU time is a system call.
void Pool::measure(int thread, int64_t min_wall) {
    ThreadState& state = states_[thread];
    const int64_t now = now_ns();
    if (!state.is_measured) return start_measuring(thread, now);
    const int64_t wall = now - state.start;
    if (wall < min_wall) return;
    const int64_t cpu_start = state.cpu_start;
    start_measuring(thread, now);
    attendance_.report(thread, wall, wall - (state.cpu_start - cpu_start));
}

// Runs on one thread while the other threads that take part are at the barrier. Returns the thread that comes back, if
// any: call it when the barrier is over.
std::optional<int> Pool::review(int64_t position) {
    const int64_t now = now_ns();
    if (now > measure_until_.load(std::memory_order_relaxed)) measure_until_.store(0, std::memory_order_relaxed);
    const auto change = attendance_.review(now);
    if (!change) return std::nullopt;
    assign_ranks();
    if (!change->is_back) {
        states_[change->thread].n_dismissals.fetch_add(1, std::memory_order_relaxed);
        return std::nullopt;
    }
    measure_for(kMeasureFor);
    position_ = position;
    called_at_ = now;
    return change->thread;
}

}  // namespace motley
