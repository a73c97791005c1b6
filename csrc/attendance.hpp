// Which threads of a pool take part in its work.
//
// A thread that shares its core with another program delays all other threads: every barrier lasts until the thread is
// scheduled again, which takes milliseconds. So a pool of n threads beside one busy program is slower than n - 1
// threads on cores of their own. Threads report the time in which they were ready to run and did not run (the *loss*);
// when the losses of a window add up to more than the worth of one thread, the thread with the largest loss leaves. It
// comes back on trial after a pause, and the pause grows with each failed trial, up to max_pause. So a pool is complete
// at most max_pause after other programs end.
//
// No clock is read here: the caller passes all times, in nanoseconds.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace motley {

struct AttendanceLimits {
    int64_t window = 8'000'000;         // over which losses are added up
    int64_t min_pause = 50'000'000;     // pause of a thread that has left
    int64_t max_pause = 400'000'000;
    double worth = 0.7;                 // of n threads, one is worth this / n of their time
    double min_loss = 0.1;              // share of a window; smaller losses are normal on every machine
};

// Not thread-safe, except `report`: each thread has its own entry there.
class Attendance {
public:
    explicit Attendance(int n_threads, AttendanceLimits limits = {})
        : limits_(limits), is_present_(n_threads, true), reports_(n_threads), pause_(limits.min_pause) {}

    int n_threads() const { return static_cast<int>(is_present_.size()); }
    int n_present() const { return n_threads() - n_absent_; }
    bool is_present(int thread) const { return is_present_[thread]; }

    // Adds a loss: the thread was ready to run for `wall` nanoseconds, and did not run for `lost` of them.
    void report(int thread, int64_t wall, int64_t lost) {
        reports_[thread].wall += wall;
        reports_[thread].lost += std::max<int64_t>(lost, 0);
    }

    // Whether the pause of the threads that have left is over.
    bool is_trial_due(int64_t now) const { return n_absent_ && !is_on_trial_ && now >= trial_at_; }

    struct Change {
        int thread;
        bool is_back;  // otherwise it has left
    };

    // Lets a thread leave or come back. Returns the change, if any.
    std::optional<Change> review(int64_t now) {
        int64_t wall = 0, lost = 0;
        for (const Report& each : reports_) {
            wall = std::max(wall, each.wall);
            lost += each.lost;
        }
        if (wall >= limits_.window) {
            const double loss = static_cast<double>(lost) / static_cast<double>(std::max<int64_t>(wall, 1));
            if (n_present() > 1 && loss > std::max(limits_.worth / n_present(), limits_.min_loss)) {
                return Change{send_away(now), false};
            }
            forget();
            if (n_absent_ == 0) {
                pause_ = limits_.min_pause;
                is_on_trial_ = false;
            } else if (is_on_trial_) {  // the trial of the last thread that came back has succeeded
                return Change{bring_back(), true};
            }
        }
        if (!is_trial_due(now)) return std::nullopt;
        return Change{bring_back(), true};
    }

private:
    struct alignas(64) Report { int64_t wall = 0, lost = 0; };

    void forget() { std::fill(reports_.begin(), reports_.end(), Report{}); }

    // The first thread is the caller's and must stay.
    int send_away(int64_t now) {
        int worst = -1;
        for (int t = 1; t < n_threads(); t++)
            if (is_present_[t] && (worst < 0 || reports_[t].lost >= reports_[worst].lost)) worst = t;
        is_present_[worst] = false;
        n_absent_++;
        if (is_on_trial_) pause_ = std::min(2 * pause_, limits_.max_pause);
        is_on_trial_ = false;
        trial_at_ = now + pause_;
        forget();
        return worst;
    }

    int bring_back() {
        const auto first = std::find(is_present_.begin(), is_present_.end(), false);
        *first = true;
        n_absent_--;
        is_on_trial_ = true;
        forget();
        return static_cast<int>(first - is_present_.begin());
    }

    const AttendanceLimits limits_;
    std::vector<char> is_present_;  // char, because access to bits is slower
    std::vector<Report> reports_;
    int n_absent_ = 0;
    bool is_on_trial_ = false;  // the last thread that came back has not completed a window yet
    int64_t pause_, trial_at_ = 0;
};

}  // namespace motley
