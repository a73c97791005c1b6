// Collectives of devices in several processes of one machine, in a file of memory that all processes have mapped.
//
// Each device has two slots, used in turn, and counts its exchanges. It writes its values of exchange k to slot k % 2,
// sets its count to k + 1, and waits for the counts of all devices. When it writes to the same slot again, all counts
// have reached k + 2, and so all devices have read the values of exchange k: there is no second wait. Values that
// do not fit into a slot are several exchanges; they are collected in this process's own memory.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>
#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "group.hpp"

namespace motley {

class SharedGroup : public Group {
public:
    static constexpr int64_t kSlotValues = 1 << 18, kMailValues = 1 << 16;

    static int64_t n_bytes(int n_devices) {
        const int64_t n = n_devices, n_pairs = n * n;
        const int64_t size = (n + 2 * n_pairs) * int64_t{sizeof(Signal)} + 4 * (2 * n * kSlotValues + n_pairs * kMailValues);
        return (size + kPage - 1) / kPage * kPage;
    }

    // Maps n_bytes(n_devices) of a file from `offset` on, a multiple of the page size. They must be zero at first.
    SharedGroup(int file, int64_t offset, int n_devices) : n_devices_(n_devices), states_(n_devices) {
        if (n_devices < 1 || n_devices > 64) throw std::invalid_argument("no such number of devices");
#if defined(__unix__) || defined(__APPLE__)
        memory_ = mmap(nullptr, n_bytes(n_devices), PROT_READ | PROT_WRITE, MAP_SHARED, file, offset);
        if (memory_ == MAP_FAILED) throw std::runtime_error("the memory cannot be mapped");
#else
        throw std::runtime_error("no shared memory on this system");
#endif
        shown_ = static_cast<Signal*>(memory_);
        sent_ = shown_ + n_devices;
        read_ = sent_ + n_devices * n_devices;
        slots_ = reinterpret_cast<float*>(read_ + n_devices * n_devices);
        mail_ = slots_ + 2 * n_devices * kSlotValues;
        for (State& state : states_) state.collected.resize(n_devices);
    }
    ~SharedGroup() override {
#if defined(__unix__) || defined(__APPLE__)
        munmap(memory_, n_bytes(n_devices_));
#endif
    }
    SharedGroup(const SharedGroup&) = delete;
    SharedGroup& operator=(const SharedGroup&) = delete;

    int n_devices() const override { return n_devices_; }

    bool show(int device, const float* values, const std::vector<int64_t>& counts) override {
        State& own = states_[device];
        const int64_t n_most = *std::max_element(counts.begin(), counts.end());
        own.values = values;
        own.is_collected = n_most > kSlotValues;
        if (own.is_collected)
            for (int d = 0; d < n_devices_; d++) own.collected[d].resize(d == device ? 0 : counts[d]);
        int64_t first = 0;
        do {
            const uint32_t number = own.n_shown++;
            copy(slot(device, number), values + first, chunk(counts[device], first, kSlotValues));
            raise(shown_[device], number + 1);
            for (int d = 0; d < n_devices_; d++)
                if (!await(shown_[d], number + 1)) return false;
            for (int d = 0; own.is_collected && d < n_devices_; d++)
                if (d != device) copy(own.collected[d].data() + first, slot(d, number), chunk(counts[d], first, kSlotValues));
            first += kSlotValues;
        } while (first < n_most);
        return true;
    }
    const float* part(int device, int source) const override {
        const State& own = states_[device];
        if (source == device) return own.values;
        return own.is_collected ? own.collected[source].data() : slot(source, own.n_shown - 1);
    }
    bool leave(int) override { return !is_aborted_.load(); }

    bool send(int source, int target, const float* x, int64_t n) override {
        const int pair = source * n_devices_ + target;
        for (int64_t first = 0; first < n; first += kMailValues) {
            const uint32_t number = sent_[pair].count.load(std::memory_order_relaxed);
            if (!await(read_[pair], number)) return false;
            copy(mail_ + pair * kMailValues, x + first, chunk(n, first, kMailValues));
            raise(sent_[pair], number + 1);
        }
        return !is_aborted_.load();
    }
    bool receive(int source, int target, float* out, int64_t n) override {
        const int pair = source * n_devices_ + target;
        for (int64_t first = 0; first < n; first += kMailValues) {
            const uint32_t number = read_[pair].count.load(std::memory_order_relaxed) + 1;
            if (!await(sent_[pair], number)) return false;
            copy(out + first, mail_ + pair * kMailValues, chunk(n, first, kMailValues));
            raise(read_[pair], number);
        }
        return !is_aborted_.load();
    }

    // Of this process's devices only: other processes learn of a failure by other ways.
    void abort() override {
        is_aborted_.store(true);
        for (Signal* signal = shown_; signal < read_ + n_devices_ * n_devices_; signal++) wake(*signal);
    }
    // After a failure the processes open new memory.
    void reset() override {}

private:
    static constexpr int64_t kPage = 1 << 16;
    static constexpr int64_t kMaxSleep = 50'000'000;  // nanoseconds

    // A counter that other processes wait for, on a cache line of its own. std::atomic::wait is for one process only.
    struct alignas(64) Signal {
        std::atomic<uint32_t> count;
        std::atomic<uint32_t> n_sleepers;
    };
    struct alignas(64) State {  // of a device of this process
        uint32_t n_shown = 0;
        bool is_collected = false;
        const float* values = nullptr;
        std::vector<std::vector<float>> collected;
    };

    static int64_t chunk(int64_t n, int64_t first, int64_t most) { return std::clamp<int64_t>(n - first, 0, most); }
    static void copy(float* out, const float* x, int64_t n) {
        if (n > 0) std::memcpy(out, x, n * sizeof(float));
    }
    float* slot(int device, uint32_t number) const { return slots_ + (2 * device + number % 2) * kSlotValues; }

    static bool has_reached(const Signal& signal, uint32_t number) {
        return static_cast<int32_t>(signal.count.load(std::memory_order_acquire) - number) >= 0;  // counts wrap around
    }

    static void raise(Signal& signal, uint32_t number) {
        signal.count.store(number, std::memory_order_seq_cst);
        if (signal.n_sleepers.load(std::memory_order_seq_cst)) wake(signal);
    }

    // Waits for a count as barrier.hpp does: spins, then yields, then sleeps. False: aborted.
    bool await(Signal& signal, uint32_t number) {
        for (int i = 0; i < kSpins; i++) {
            if (has_reached(signal, number)) return !is_aborted_.load(std::memory_order_relaxed);
            relax();
        }
        const int64_t end = now_ns() + std::chrono::nanoseconds(kStayAwake).count();
        while (!has_reached(signal, number)) {
            if (is_aborted_.load()) return false;
            if (now_ns() < end)
                std::this_thread::yield();
            else
                sleep(signal, number);
        }
        return !is_aborted_.load();
    }

    static void sleep(Signal& signal, uint32_t number) {
#if defined(__linux__)
        signal.n_sleepers.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t seen = signal.count.load(std::memory_order_seq_cst);
        if (static_cast<int32_t>(seen - number) < 0) {
            const timespec limit{0, kMaxSleep};  // `abort` may come before the system call
            syscall(SYS_futex, &signal.count, FUTEX_WAIT, seen, &limit, nullptr, 0);
        }
        signal.n_sleepers.fetch_sub(1, std::memory_order_seq_cst);
#else
        (void)signal, (void)number;
        std::this_thread::sleep_for(std::chrono::microseconds(100));
#endif
    }
    static void wake([[maybe_unused]] Signal& signal) {
#if defined(__linux__)
        syscall(SYS_futex, &signal.count, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
    }

    const int n_devices_;
    std::vector<State> states_;
    std::atomic<bool> is_aborted_{false};
    void* memory_ = nullptr;
    Signal *shown_ = nullptr, *sent_ = nullptr, *read_ = nullptr;
    float *slots_ = nullptr, *mail_ = nullptr;
};

}  // namespace motley
