#include "program.hpp"

namespace motley {
namespace {

constexpr double kWorthSharing = 3000;  // nanoseconds

bool is_local(const Group& group) { return dynamic_cast<const LocalGroup*>(&group) != nullptr; }

}  // namespace

void Program::add(Step step, double work) {
    const bool is_shared = pool_->n_threads() > 1 && work > kWorthSharing;
    steps_.push_back({std::move(step), is_shared, std::make_unique<std::atomic<int64_t>>(0)});
}

void Program::add_rendezvous(std::function<bool()> rendezvous) {
    add([this, rendezvous](const Worker&) { if (!rendezvous()) has_failed_.store(true); }, 0);
}

void Program::add_all_reduce(std::shared_ptr<Group> group, int device, const float* x, float* out, int64_t n) {
    constexpr int64_t kChunk = 4096;
    const auto n_actual = [this, n_all = n, rows = rows_] {
        int64_t n = n_all;
        rescale(n, n_rows(rows), rows.n_planned);
        return n;
    };
    add_rendezvous([=] { return group->show(device, x, std::vector<int64_t>(group->n_devices(), n_actual())); });
    const auto sum = [group, device, out, n_actual](const Worker& worker) {
        const int64_t n = n_actual();
        for (int64_t task; (task = worker.take()) * kChunk < n;) {
            const int64_t first = task * kChunk, stop = n < first + kChunk ? n : first + kChunk;
            const float* part = group->part(device, 0);
            for (int64_t i = first; i < stop; i++) out[i] = part[i];
            for (int d = 1; d < group->n_devices(); d++) {
                part = group->part(device, d);
                for (int64_t i = first; i < stop; i++) out[i] += part[i];
            }
        }
    };
    add([this, sum](const Worker& worker) { if (!has_failed_.load()) sum(worker); }, static_cast<double>(n) * 0.3);
    add_rendezvous([=] { return group->leave(device); });
}

void Program::add_exchange(std::shared_ptr<Group> group, int device, const float* x, std::vector<Piece> pieces,
                           std::vector<int64_t> counts) {
    if (static_cast<int>(counts.size()) != group->n_devices() && !is_local(*group)) throw std::invalid_argument("a count for each device");
    add_rendezvous([=, counts = std::move(counts)] { return group->show(device, x, counts); });
    add([this, group, device, pieces = std::move(pieces)](const Worker& worker) {
        if (has_failed_.load()) return;
        for (const Piece& piece : pieces) {  // on the first thread
            std::atomic<int64_t> next{0};
            CopyArgs copy = piece.copy;
            copy.source = group->part(device, piece.device) + piece.offset;
            kernels().copy(copy, {0, 1, &next, worker.scratch});
        }
    }, 0);
    add_rendezvous([=] { return group->leave(device); });
}

void Program::add_receive(std::shared_ptr<Group> group, int device, int source, float* out, int64_t n) {
    if (n < 0 && !is_local(*group)) throw std::invalid_argument("the number of values");
    add_rendezvous([=] { return group->receive(source, device, out, n); });
}

void Program::add_tagged_pieces(std::shared_ptr<TaggedMemory> memory, int64_t place, int64_t n, int device, const float* x,
                                std::vector<Piece> pieces) {
    const auto message = std::make_shared<std::vector<float>>(n);
    add_await(memory, place, message->data(), n, nullptr);
    add([this, message, device, x, pieces = std::move(pieces)](const Worker& worker) {
        if (has_failed_.load()) return;
        for (const Piece& piece : pieces) {  // on the first thread
            std::atomic<int64_t> next{0};
            CopyArgs copy = piece.copy;
            copy.source = (piece.device == device ? x : message->data()) + piece.offset;
            kernels().copy(copy, {0, 1, &next, worker.scratch});
        }
    }, 0);
}

void Program::run(int64_t n_tokens, int64_t n_outputs) {
    set_batch(n_tokens, n_outputs);
    run_batch();
}

void Program::run_batch() {
    has_failed_.store(false);
    for (auto& entry : steps_) entry.next->store(0, std::memory_order_relaxed);
    bool is_shared = false;
    for (const auto& entry : steps_) is_shared = is_shared || entry.is_shared;
    if (is_shared) {
        pool_->run([this](int thread, int64_t first) { return run_thread(thread, static_cast<size_t>(first)); });
    } else {
        const CoreBinding binding = pool_->bind_caller();
        for (auto& entry : steps_) entry.step({0, 1, entry.next.get(), pool_->worker(0, nullptr).scratch});
    }
    if (has_failed_.load()) throw Aborted();
}

bool Program::run_thread(int thread, size_t first) {
    for (size_t i = first; i < steps_.size(); i++) {
        Entry& entry = steps_[i];
        if (entry.is_shared)
            entry.step(pool_->worker(thread, entry.next.get()));
        else if (thread == 0)
            entry.step({0, 1, entry.next.get(), pool_->worker(0, nullptr).scratch});
        const bool is_next_shared = i + 1 < steps_.size() && steps_[i + 1].is_shared;
        if ((entry.is_shared || is_next_shared) && !pool_->rendezvous(thread, static_cast<int64_t>(i) + 1)) return false;
    }
    return true;
}

}  // namespace motley
