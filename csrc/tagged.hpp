// Messages between a native program and a device that reads and writes the host's memory by itself, such as a GPU.
//
// Each value is stored with the number of its run, its tag, in one word of 8 bytes: the reader waits until every word has the
// tag of this run. So nothing depends on the order in which words arrive, and no thread has to announce a message. Each
// message of a program has its own place, and is read before the next run begins.
#pragma once
#include <atomic>
#include <bit>
#include <cstdint>
#include <thread>

#include "barrier.hpp"

namespace motley {

class TaggedMemory {
public:
    // `incoming` is written by the other device, `outgoing` by this one; at first all of it is zero. `abort_word`: the
    // other device stops waiting when it is not zero.
    TaggedMemory(uint64_t* incoming, uint64_t* outgoing, uint32_t* abort_word)
        : incoming_(incoming), outgoing_(outgoing), abort_word_(abort_word) {}

    // Begins a run.
    void advance() { tag_++; }
    uint32_t tag() const { return tag_; }

    void post(int64_t place, const float* x, int64_t n) {
        const uint64_t tag = static_cast<uint64_t>(tag_) << 32;
        for (int64_t i = 0; i < n; i++)
            std::atomic_ref(outgoing_[place + i]).store(tag | std::bit_cast<uint32_t>(x[i]), std::memory_order_relaxed);
    }

    // out = the message, or its sum with `addend`. False: another device has failed.
    bool await(int64_t place, float* out, int64_t n, const float* addend = nullptr) {
        if (n) wait_for(place + n - 1);  // usually the last word to arrive
        for (int64_t i = 0; i < n; i++) {
            uint64_t word = load(place + i);
            if (word >> 32 != tag_) word = wait_for(place + i);
            const float value = std::bit_cast<float>(static_cast<uint32_t>(word));
            out[i] = addend ? value + addend[i] : value;
        }
        return !is_aborted_.load(std::memory_order_acquire);
    }

    void abort() {
        is_aborted_.store(true, std::memory_order_release);
        std::atomic_ref(*abort_word_).store(1, std::memory_order_release);
    }

    // Call it only when no device is waiting. Tags of earlier runs must not come again: both devices go on from `tag`.
    void reset(uint32_t tag) {
        tag_ = tag;
        is_aborted_.store(false);
        std::atomic_ref(*abort_word_).store(0);
    }

private:
    uint64_t load(int64_t i) const { return std::atomic_ref(incoming_[i]).load(std::memory_order_acquire); }

    uint64_t wait_for(int64_t i) const {
        constexpr auto kNap = std::chrono::microseconds(100);  // no one can wake this thread: it looks again
        uint64_t word = 0;
        const auto is_over = [&] {
            word = load(i);
            return word >> 32 == tag_ || is_aborted_.load(std::memory_order_acquire);
        };
        for (int spin = 0; spin < kSpins; spin++) {
            if (is_over()) return word;
            relax();
        }
        for (const int64_t end = now_ns() + std::chrono::nanoseconds(kStayAwake).count(); now_ns() < end;) {
            if (is_over()) return word;
            std::this_thread::yield();
        }
        while (!is_over()) std::this_thread::sleep_for(kNap);
        return word;
    }

    uint64_t* const incoming_;
    uint64_t* const outgoing_;
    uint32_t* const abort_word_;
    uint32_t tag_ = 0;
    std::atomic<bool> is_aborted_{false};
};

}  // namespace motley
