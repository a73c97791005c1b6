// Where programs of several devices exchange data: each device publishes its values and reads those of all devices; or
// one device sends and another receives. Here for the devices of one process; for several processes: shared_group.hpp.
#pragma once
#include <algorithm>
#include <vector>

#include "barrier.hpp"

namespace motley {

class Group {
public:
    virtual ~Group() = default;
    virtual int n_devices() const = 0;

    // Publishes the counts[device] values of a device and waits for all devices. False if another device has failed.
    virtual bool show(int device, const float* values, const std::vector<int64_t>& counts) = 0;
    // The values of `source` for `device`, which may read them between `show` and `leave`.
    virtual const float* part(int device, int source) const = 0;
    virtual bool leave(int device) = 0;

    // Waits only while the previous message is unread. Both return false if another device has failed.
    virtual bool send(int source, int target, const float* x, int64_t n) = 0;
    virtual bool receive(int source, int target, float* out, int64_t n) = 0;

    // All functions fail from now on, those that wait included.
    virtual void abort() = 0;
    // Call it only when no device is in the group's functions.
    virtual void reset() = 0;
};

class LocalGroup : public Group {
public:
    explicit LocalGroup(int n_devices) : barrier_(n_devices), parts_(n_devices, nullptr), mail_(n_devices * n_devices) {}

    int n_devices() const override { return static_cast<int>(parts_.size()); }

    bool show(int device, const float* values, const std::vector<int64_t>&) override {
        parts_[device] = values;
        return barrier_.arrive_and_wait();
    }
    const float* part(int, int source) const override { return parts_[source]; }
    bool leave(int) override { return barrier_.arrive_and_wait(); }

    bool send(int source, int target, const float* x, int64_t n) override {
        Mail& mail = mail_[source * n_devices() + target];
        const uint32_t n_sent = mail.n_sent.load(std::memory_order_relaxed);
        for (uint32_t n_read; (n_read = mail.n_read.load(std::memory_order_acquire)) != n_sent && !is_aborted_.load();)
            await_change(mail.n_read, n_read);
        mail.values.assign(x, x + n);
        bump(mail.n_sent);
        return !is_aborted_.load();
    }
    bool receive(int source, int target, float* out, int64_t) override {
        Mail& mail = mail_[source * n_devices() + target];
        const uint32_t n_read = mail.n_read.load(std::memory_order_relaxed);
        // Another device may have failed before: then nothing comes, and the counts are as if nothing had been sent.
        if (!is_aborted_.load()) await_change(mail.n_sent, n_read);
        if (is_aborted_.load()) return false;
        std::copy(mail.values.begin(), mail.values.end(), out);
        bump(mail.n_read);
        return true;
    }

    void abort() override {
        is_aborted_.store(true);
        barrier_.abort();
        for (Mail& mail : mail_) {
            bump(mail.n_sent);
            bump(mail.n_read);
        }
    }

    void reset() override {
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
