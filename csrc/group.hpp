// Rendezvous of the programs of several devices in one process: each device publishes its buffer and all devices read
// all buffers; or one device sends and another receives.
#pragma once
#include <algorithm>
#include <vector>

#include "barrier.hpp"

namespace motley {

class Group {
public:
    explicit Group(int n_devices) : barrier_(n_devices), parts_(n_devices, nullptr), mail_(n_devices * n_devices) {}

    // Publishes a device's buffer and waits for all devices. False if another device has failed.
    bool show(int device, const float* part) {
        parts_[device] = part;
        return barrier_.arrive_and_wait();
    }
    bool leave() { return barrier_.arrive_and_wait(); }
    const float* part(int device) const { return parts_[device]; }
    int n_devices() const { return static_cast<int>(parts_.size()); }

    // Waits only while the previous message is unread. False if another device has failed.
    bool send(int source, int target, const float* x, int64_t n) {
        Mail& mail = mail_[source * n_devices() + target];
        const uint32_t n_sent = mail.n_sent.load(std::memory_order_relaxed);
        for (uint32_t n_read; (n_read = mail.n_read.load(std::memory_order_acquire)) != n_sent && !is_aborted_.load();)
            await_change(mail.n_read, n_read);
        mail.values.assign(x, x + n);
        bump(mail.n_sent);
        return !is_aborted_.load();
    }
    bool receive(int source, int target, float* out) {
        Mail& mail = mail_[source * n_devices() + target];
        await_change(mail.n_sent, mail.n_read.load(std::memory_order_relaxed));
        if (is_aborted_.load()) return false;
        std::copy(mail.values.begin(), mail.values.end(), out);
        bump(mail.n_read);
        return true;
    }

    void abort() {
        is_aborted_.store(true);
        barrier_.abort();
        for (Mail& mail : mail_) {
            bump(mail.n_sent);
            bump(mail.n_read);
        }
    }

    // Call it only when no device is in the group's functions.
    void reset() {
        barrier_.reset();
        for (Mail& mail : mail_) {
            mail.n_sent.store(0);
            mail.n_read.store(0);
        }
        is_aborted_.store(false);
    }

private:
    struct Mail {
        std::vector<float> values;
        std::atomic<uint32_t> n_sent{0}, n_read{0};
    };
    static void bump(std::atomic<uint32_t>& count) {
        count.fetch_add(1, std::memory_order_acq_rel);
        count.notify_all();
    }

    Barrier barrier_;
    std::vector<const float*> parts_;
    std::vector<Mail> mail_;
    std::atomic<bool> is_aborted_{false};
};

}  // namespace motley
