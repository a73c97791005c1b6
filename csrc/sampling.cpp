#include "sampling.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "dispatch.hpp"
#include "order.hpp"

namespace motley {
namespace {

constexpr double kTiny = std::numeric_limits<float>::min();
constexpr int64_t kWorthSharing = 1 << 16;  // logits

// The random word of a token id: Philox4x32-10.
uint32_t random_word(uint64_t key, uint64_t index, uint32_t id) {
    uint32_t c0 = id / 4, c1 = static_cast<uint32_t>(index), c2 = static_cast<uint32_t>(index >> 32), c3 = 0;
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        const uint64_t a = uint64_t{c0} * 0xD2511F53u, b = uint64_t{c2} * 0xCD9E8D57u;
        c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(b);
        c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(a);
    }
    const uint32_t words[4] = {c0, c1, c2, c3};
    return words[id % 4];
}

double gumbel(uint64_t key, uint64_t index, uint32_t id) {
    return -std::log(-std::log1p(-(random_word(key, index, id) + 0.5) * 0x1p-32));
}

struct Candidate {
    int32_t order, id;
    bool operator<(const Candidate& other) const { return order != other.order ? order > other.order : id < other.id; }
};

// Chooses for one row after another; its memory serves all of them.
class RowChooser {
public:
    RowChooser(const Kernels& kernels, int64_t n_columns)
        : kernels_(kernels), n_columns_(n_columns), peaks_((n_columns + kPeakStretch - 1) / kPeakStretch) {}

    int32_t choose(const float* row, const RowSampler& sampler, uint64_t index) {
        kernels_.peaks(row, n_columns_, peaks_.data());
        const int32_t best = find_best(row);
        if (!std::isfinite(row[best])) return row[best] == -INFINITY ? kNoneLeft : kNotFinite;
        return sampler.temperature == 0 ? best : draw(row, sampler, index);
    }

private:
    // The first of the largest values.
    int32_t find_best(const float* row) const {
        const auto peak = std::max_element(peaks_.begin(), peaks_.end());
        int64_t i = (peak - peaks_.begin()) * kPeakStretch;
        while (order_of(row[i]) != *peak) i++;
        return static_cast<int32_t>(i);
    }

    // The k largest values in descending order. The k-th largest of the peaks is a lower bound of the k-th largest
    // value, and few values reach it.
    void collect(const float* row, int64_t k) {
        int32_t least = INT32_MIN;
        if (k <= static_cast<int64_t>(peaks_.size())) {
            sorted_ = peaks_;
            std::nth_element(sorted_.begin(), sorted_.begin() + (k - 1), sorted_.end(), std::greater<>());
            least = sorted_[k - 1];
        }
        found_.clear();
        for (size_t s = 0; s < peaks_.size(); s++) {
            if (peaks_[s] < least) continue;
            const int64_t first = static_cast<int64_t>(s) * kPeakStretch, stop = std::min(first + kPeakStretch, n_columns_);
            for (int64_t i = first; i < stop; i++)
                if (const int32_t order = order_of(row[i]); order >= least) found_.push_back({order, static_cast<int32_t>(i)});
        }
        k = std::min<int64_t>(k, found_.size());
        std::partial_sort(found_.begin(), found_.begin() + k, found_.end());
        found_.resize(k);
    }

    int32_t draw(const float* row, const RowSampler& sampler, uint64_t index) {
        collect(row, sampler.top_k);
        const double best = row[found_[0].id];
        int64_t n = 0;  // candidates that are left: each filter leaves the first ones
        values_.clear();
        for (const Candidate& each : found_)
            if (row[each.id] != -INFINITY) values_.push_back(row[each.id]), n++;
        if (sampler.top_p < 1) {
            double total = 0, mass = 0;
            for (int64_t i = 0; i < n; i++) total += std::exp(values_[i] - best);
            for (int64_t i = 0; i < n; i++)
                if ((mass += std::exp(values_[i] - best) / total) >= std::max(sampler.top_p, kTiny)) n = i + 1;
        }
        if (sampler.min_p > 0)
            while (values_[n - 1] < best + std::log(sampler.min_p)) n--;
        int32_t chosen = found_[0].id;
        double most = -INFINITY;
        for (int64_t i = 0; i < n; i++) {
            const double value = sampler.temperature == 1 ? values_[i] : (values_[i] - best) / std::max(sampler.temperature, kTiny);
            const double score = n == 1 ? 0 : value + gumbel(sampler.key, index, found_[i].id);
            if (score > most) most = score, chosen = found_[i].id;
        }
        return chosen;
    }

    const Kernels& kernels_;
    const int64_t n_columns_;
    std::vector<int32_t> peaks_, sorted_;
    std::vector<Candidate> found_;
    std::vector<double> values_;
};

struct ChoiceArgs {
    const float* logits;
    int64_t n_rows, n_columns;
    const RowSampler* const* samplers;
    const int64_t* indexes;
    int32_t* tokens;
};

void choose_some(const ChoiceArgs& args, const Worker& worker) {
    static const Kernels& kernels = kernels_for("");
    RowChooser chooser(kernels, args.n_columns);
    for (int64_t row; (row = worker.take()) < args.n_rows;)
        args.tokens[row] = chooser.choose(args.logits + row * args.n_columns, *args.samplers[row], static_cast<uint64_t>(args.indexes[row]));
}

}  // namespace

void choose_tokens(const float* logits, int64_t n_rows, int64_t n_columns, const RowSampler* const* samplers, const int64_t* indexes,
                   int32_t* tokens, Pool* pool) {
    const ChoiceArgs args{logits, n_rows, n_columns, samplers, indexes, tokens};
    if (pool && n_rows > 1 && n_rows * n_columns >= kWorthSharing) return pool->run_kernel(choose_some, args);
    std::atomic<int64_t> next{0};
    choose_some(args, {0, 1, &next, nullptr});
}

}  // namespace motley
