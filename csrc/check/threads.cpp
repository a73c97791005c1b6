// Threads that leave and come back, and devices that exchange values.
#include <algorithm>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "../program.hpp"
#include "../shared_group.hpp"
#include "../team.hpp"
#include "check.hpp"

namespace motley {
namespace {

constexpr int64_t kMs = 1'000'000;

// Reports n windows in which the threads that take part lose these shares of their time; `now` advances with each one.
void report_windows(Attendance& attendance, int64_t& now, int n, double loss_of_last, double loss_of_first = 0) {
    for (int i = 0; i < n; i++) {
        now += 8 * kMs;
        int last = 0;
        for (int t = 0; t < attendance.n_threads(); t++) last = attendance.is_present(t) ? t : last;
        for (int t = 0; t <= last; t++)
            if (attendance.is_present(t))
                attendance.report(t, 8 * kMs, static_cast<int64_t>((t == last ? loss_of_last : t == 0 ? loss_of_first : 0) * 8 * kMs));
        attendance.review(now);
    }
}

}  // namespace

// When threads leave and come back, with a simulated clock.
void check_attendance() {
    int64_t now = 1000 * kMs;
    Attendance pair(2);
    report_windows(pair, now, 10, 0.1);
    require(pair.n_present() == 2, "a small loss sends a thread away", "attendance");
    report_windows(pair, now, 1, 0.5);
    require(pair.n_present() == 1 && pair.is_present(0), "half of a core lost, and both stay", "attendance");
    const int64_t left_at = now;
    while (!pair.is_trial_due(now)) now += kMs;
    require(now - left_at == 50 * kMs, "the first trial is not after the shortest pause", "attendance");
    for (int i = 0; i < 10; i++) {  // trials that fail
        while (!pair.is_trial_due(now)) now += kMs;
        pair.review(now);
        require(pair.n_present() == 2, "a trial is due, and nobody comes", "attendance");
        report_windows(pair, now, 1, 0.0, 0.6);  // the caller's loss also counts
        require(pair.n_present() == 1, "a trial fails, and the thread stays", "attendance");
    }
    const int64_t alone_at = now;
    while (!pair.is_trial_due(now)) now += kMs;
    pair.review(now);
    report_windows(pair, now, 3, 0);
    require(pair.n_present() == 2 && now - alone_at < 500 * kMs, "alone again, and not complete in time", "attendance");

    Attendance many(16);
    report_windows(many, now, 3, 0.5);  // three programs start, one after the other
    require(many.n_present() == 13, "not one thread left for each program", "attendance");
    while (!many.is_trial_due(now)) now += kMs;
    many.review(now);
    report_windows(many, now, 3, 0);
    require(many.n_present() == 16, "trials that succeed are not followed by the next", "attendance");
}

// Threads of one pool leave and come back at every possible barrier, and each task is still done exactly once.
// `worth`: below 0, threads leave until one is left; above, they leave after a loss, and one comes back at each barrier.
static void run_changing_threads(double worth, const std::vector<int>& cores) {
    constexpr int kSteps = 40, kTasks = 64, kRounds = 100;
    AttendanceLimits limits;
    limits.window = 0;
    limits.min_pause = limits.max_pause = 0;
    limits.worth = limits.min_loss = worth;
    auto pool = std::make_shared<Pool>(4, "", cores, limits);
    std::vector<std::vector<int>> n_done(kSteps, std::vector<int>(kTasks));
    Program program(pool);
    int fewest = 4, most = 0;
    for (int step = 0; step < kSteps; step++) {
        program.add([&, step](const Worker& worker) {
            require(worker.thread < worker.n_threads && worker.n_threads <= 4, "a number that is not among those present", "threads");
            for (int64_t task; (task = worker.take()) < kTasks;) n_done[step][task] += step == 0 || n_done[step - 1][task] ? 1 : 100;
        }, step % 5 == 4 ? 0 : 1e6);
        program.add([&](const Worker&) { fewest = std::min(fewest, pool->n_present()); most = std::max(most, pool->n_present()); }, 0);
    }
    pool->measure_for(int64_t{1} << 60);
    for (int round = 0; round < kRounds; round++) {
        for (auto& step : n_done) std::fill(step.begin(), step.end(), 0);
        program.run();
        for (const auto& step : n_done)
            for (const int n : step) require(n == 1, "a task is not done once, after those before it", "threads");
    }
    require(worth > 0 || (fewest == 1 && most > 1), "threads neither left nor came", "threads");
}

static int first_core() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return 0;
#endif
}

// Several pools at once, so that a thread may be interrupted anywhere. The threads of half of them share one core: there,
// a thread that is called often runs before the one that called it.
void check_changing_threads() {
    std::vector<std::thread> callers;
    for (const double worth : {-1.0, 0.2, 0.2})
        for (const auto& cores : {std::vector<int>{}, std::vector<int>(4, first_core())}) callers.emplace_back(run_changing_threads, worth, cores);
    for (auto& caller : callers) caller.join();
}

namespace {

// Repeated all-reduces of devices, each with its own threads, and messages.
void run_group(const std::vector<std::shared_ptr<Group>>& groups, int64_t n_values) {
    constexpr int kDevices = 3, kRounds = 20;
    std::vector<std::vector<float>> parts, sums(kDevices, std::vector<float>(n_values));
    std::vector<std::unique_ptr<Program>> programs;
    std::vector<Program*> members;
    for (int d = 0; d < kDevices; d++) {
        parts.emplace_back(n_values, static_cast<float>(d + 1));
        programs.push_back(std::make_unique<Program>(std::make_shared<Pool>(2, "", std::vector<int>{})));
        programs[d]->add_all_reduce(groups[d], d, parts[d].data(), sums[d].data(), n_values);
        members.push_back(programs[d].get());
    }
    std::vector<float> heard(n_values), again(n_values);
    programs[0]->add_send(groups[0], 0, 2, parts[0].data(), n_values);
    programs[2]->add_receive(groups[2], 2, 0, heard.data(), n_values);
    programs[2]->add_send(groups[2], 2, 1, heard.data(), n_values);
    programs[1]->add_receive(groups[1], 1, 2, again.data(), n_values);
    Team team(kDevices);
    for (int i = 0; i < kRounds; i++) {
        for (auto& sum : sums) sum.assign(n_values, 0.0f);
        team.run(members);
        for (const auto& sum : sums) require(sum[0] == 6.0f && sum[n_values - 1] == 6.0f, "wrong sum", "group");
        require(again[0] == 1.0f && again[n_values - 1] == 1.0f, "wrong mail", "group");
    }
}

}  // namespace

void check_group() {
    const auto local = std::make_shared<LocalGroup>(3);
    run_group({local, local, local}, 20000);
    float nothing = 0;
    local->abort();  // by a device that failed before the others came
    require(!local->receive(0, 1, &nothing, 1), "nothing was sent", "group");
    require(!local->send(1, 0, &nothing, 1), "nobody receives", "group");
#if defined(__linux__)
    // As in three processes, each of which has mapped the memory. The second time, values do not fit into a slot.
    for (const int64_t n_values : {int64_t{20000}, SharedGroup::kSlotValues + 5}) {
        const int file = memfd_create("check", 0);
        require(file >= 0 && ftruncate(file, SharedGroup::n_bytes(3)) == 0, "no memory", "shared group");
        std::vector<std::shared_ptr<Group>> groups;
        for (int d = 0; d < 3; d++) groups.push_back(std::make_shared<SharedGroup>(file, 0, 3));
        close(file);
        run_group(groups, n_values);
        std::thread waiting([&] {
            float value = 0;
            require(!groups[1]->receive(0, 1, &value, 1), "nothing was sent", "shared group");
        });
        groups[1]->abort();
        waiting.join();
    }
#endif
}

}  // namespace motley
