// Mixture of experts: the choice of experts for each token, and their FFNs.
//
//     route           logits → the ids of each token's experts, best first
//     route_weights   logits, ids → the experts' weights
//     expert_group    ids → places: a row for each (token, expert); the rows of one expert are contiguous
//     expert_gather   copies each token's row of x to its places
//     expert_matmul   each expert's matrix (or gate and up) × its rows: a matrix product for each expert that has rows.
//                     Threads take tasks from one expert after the other without a barrier between them, so an expert
//                     with most of the rows keeps all threads busy.
//     expert_sum      out[token] = Σ weight · row at its places (+ residual), in the order of its experts
//
// An id of -1 has no place. Only matmul (and the compiler's output) depends on the instruction set.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../kernels.hpp"
#include "simd.hpp"

namespace motley::MOTLEY_ISA {

void matmul(const MatMulArgs&, const Worker&);

namespace {

float sigmoid_of(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// scores[e] of one token, for the choice of experts only.
void choice_scores(const RouteArgs& a, const float* logits, float* scores) {
    for (int64_t e = 0; e < a.n_experts; e++) {
        scores[e] = a.is_sigmoid ? sigmoid_of(logits[e]) : logits[e];
        if (a.bias) scores[e] += a.bias[e];
        if (std::isnan(scores[e])) scores[e] = INFINITY;  // it is chosen, so that its weight shows the NaN
    }
    if (a.n_groups_used >= a.n_groups) return;
    const int64_t size = a.n_experts / a.n_groups;
    float worth[kMaxExpertGroups];
    for (int64_t g = 0; g < a.n_groups; g++) {
        float best = -INFINITY, second = -INFINITY;
        for (int64_t e = g * size; e < (g + 1) * size; e++) {
            if (scores[e] > best) {
                second = best;
                best = scores[e];
            } else {
                second = std::max(second, scores[e]);
            }
        }
        worth[g] = size > 1 ? best + second : best;
    }
    for (int64_t g = 0; g < a.n_groups; g++) {
        int64_t n_better = 0;  // the lower group first among equals
        for (int64_t other = 0; other < a.n_groups; other++)
            n_better += worth[other] > worth[g] || (worth[other] == worth[g] && other < g);
        if (n_better >= a.n_groups_used) std::fill(scores + g * size, scores + (g + 1) * size, -INFINITY);
    }
}

// The ids of the n_used largest scores, the largest first, the lower id first among equals; then -1, up to k. A score of
// -INFINITY is never chosen.
void choose_best(const float* scores, int64_t n_experts, int64_t n_used, int32_t* ids, int64_t k) {
    int64_t n = 0;
    float worst = -INFINITY;  // of the ids so far, if there are n_used
    for (int64_t e = 0; e < n_experts; e++) {
        const float score = scores[e];
        if (!(score > worst) || n_used < 1) continue;
        if (n < n_used) n++;
        int64_t at = n - 1;
        for (; at > 0 && score > scores[ids[at - 1]]; at--) ids[at] = ids[at - 1];
        ids[at] = static_cast<int32_t>(e);
        if (n == n_used) worst = scores[ids[n - 1]];
    }
    std::fill(ids + n, ids + k, -1);
}

}  // namespace

void route(const RouteArgs& a, const Worker& worker) {
    auto* scores = reinterpret_cast<float*>(worker.scratch);
    for (int64_t token; (token = worker.take()) < a.n_tokens;) {
        choice_scores(a, a.logits + token * a.n_experts, scores);
        choose_best(scores, a.n_experts, std::min<int64_t>(a.n_used[token], a.k), a.ids + token * a.k, a.k);
    }
}

void route_weights(const RouteWeightsArgs& a, const Worker& worker) {
    for (int64_t token; (token = worker.take()) < a.n_tokens;) {
        const float* logits = a.logits + token * a.n_experts;
        const int32_t* ids = a.ids + token * a.k;
        float* out = a.out + token * a.k;
        float most = -INFINITY, sum = 0;
        if (!a.is_sigmoid) {  // over the chosen experts, or over all of them
            if (a.normalizes)
                for (int64_t i = 0; i < a.k; i++) most = ids[i] >= 0 ? std::max(most, logits[ids[i]]) : most;
            else
                most = *std::max_element(logits, logits + a.n_experts);
        }
        for (int64_t i = 0; i < a.k; i++) {
            out[i] = 0;
            if (ids[i] < 0) continue;
            out[i] = a.is_sigmoid ? sigmoid_of(logits[ids[i]]) : std::exp(logits[ids[i]] - most);
            sum += out[i];
        }
        if (!a.normalizes) {
            sum = 1;
            if (!a.is_sigmoid) {
                sum = 0;
                for (int64_t e = 0; e < a.n_experts; e++) sum += std::exp(logits[e] - most);
            }
        } else if (a.is_sigmoid) {
            sum += 1e-20f;
        }
        for (int64_t i = 0; i < a.k; i++)
            if (ids[i] >= 0) out[i] = out[i] / sum * a.scale;
    }
}

// Runs on one thread: there are a few thousand numbers at most. Ids that no expert has count as -1: those of padding rows
// may be any numbers.
void expert_group(const ExpertGroupArgs& a, const Worker& worker) {
    if (worker.take() != 0) return;
    const ExpertPlaces& p = a.places;
    const auto is_expert = [&](int32_t id) { return id >= 0 && id < p.n_experts; };
    std::fill(p.bounds, p.bounds + p.n_experts + 1, 0);
    for (int64_t e = 0; e < 2 * p.n_experts; e++) p.next[e].store(0, std::memory_order_relaxed);
    for (int64_t i = 0; i < a.n_ids; i++)
        if (is_expert(a.ids[i])) p.bounds[a.ids[i] + 1]++;
    for (int64_t e = 0; e < p.n_experts; e++) p.bounds[e + 1] += p.bounds[e];
    // Each bound is incremented as its expert's rows are placed, and restored afterwards.
    for (int64_t i = 0; i < a.n_ids; i++) {
        p.place_of[i] = is_expert(a.ids[i]) ? p.bounds[a.ids[i]]++ : -1;
        if (p.place_of[i] >= 0) p.id_at[p.place_of[i]] = static_cast<int32_t>(i);
    }
    for (int64_t e = p.n_experts; e > 0; e--) p.bounds[e] = p.bounds[e - 1];
    p.bounds[0] = 0;
}

void expert_gather(const ExpertGatherArgs& a, const Worker& worker) {
    const int64_t n_places = a.places.bounds[a.places.n_experts], n = a.n_columns, n_steps = n / 32;
    for (int64_t place; (place = worker.take()) < n_places;) {
        const int64_t token = a.places.id_at[place] / a.k;
        if (a.out.values)
            std::memcpy(const_cast<float*>(a.out.values) + place * a.out.stride, a.x.values + token * a.x.stride, n * sizeof(float));
        if (a.x.codes) {
            std::memcpy(a.out.codes + place * n, a.x.codes + token * n, n);
            std::memcpy(a.out.scales + place * n_steps, a.x.scales + token * n_steps, n_steps * sizeof(float));
            std::memcpy(a.out.sums + place * n_steps, a.x.sums + token * n_steps, n_steps * sizeof(float));
            std::memcpy(a.out.code_sums + place * 2 * n_steps, a.x.code_sums + token * 2 * n_steps, 2 * n_steps * sizeof(int32_t));
            std::memcpy(a.out.half_sums + place * 2 * n_steps, a.x.half_sums + token * 2 * n_steps, 2 * n_steps * sizeof(float));
        }
    }
}

void expert_matmul(const ExpertMatMulArgs& a, const Worker& worker) {
    const MatMulArgs& all = a.product;
    for (int64_t e = 0; e < a.places.n_experts; e++) {
        const int64_t first = a.places.bounds[e], n_rows = a.places.bounds[e + 1] - first;
        if (!n_rows) continue;
        MatMulArgs own = all;
        own.n_tokens = n_rows;
        own.x.values = all.x.values ? all.x.values + first * all.x.stride : nullptr;
        if (all.x.codes) {
            const int64_t n_steps = all.n_columns / 32;
            own.x.codes += first * all.n_columns;
            own.x.scales += first * n_steps;
            own.x.sums += first * n_steps;
            own.x.half_sums += first * 2 * n_steps;
            own.x.code_sums += first * 2 * n_steps;
        }
        for (int p = 0; p < all.n_parts; p++) {
            MatMulPart& part = own.parts[p];
            part.weight += e * a.weight_stride[p];
            if (part.bias) part.bias += e * part.n_rows;
            part.out += first * part.out_stride;
        }
        matmul(own, {worker.thread, worker.n_threads, a.places.next + a.pass * a.places.n_experts + e, worker.scratch});
    }
}

void expert_sum(const ExpertSumArgs& a, const Worker& worker) {
    for (int64_t token; (token = worker.take()) < a.n_tokens;) {
        float* out = a.out + token * a.n_columns;
        if (a.residual)
            std::memmove(out, a.residual + token * a.n_columns, a.n_columns * sizeof(float));
        else
            std::fill(out, out + a.n_columns, 0.0f);
        for (int64_t i = 0; i < a.k; i++) {
            const int64_t place = a.places.place_of[token * a.k + i];
            if (place < 0) continue;
            const float weight = a.weights[token * a.k + i];
            const float* row = a.rows + place * a.n_columns;
            for (int64_t c = 0; c < a.n_columns; c++) out[c] += weight * row[c];
        }
    }
}

}  // namespace motley::MOTLEY_ISA
