// Batches with fewer rows than their program was made for: kernel arguments for the actual rows.
//
// A program is made for a number of tokens and a number of outputs, and runs all batches up to these sizes. Values are
// stored row by row, so a call for fewer rows is the same call with a smaller count. Calls that are not by rows
// (kAllRows) use all rows.
#pragma once
#include "kernels.hpp"

namespace motley {

enum RowKind { kAllRows, kTokenRows, kOutputRows, kNumRowKinds };

struct RowCount {
    int kind = kAllRows;
    int64_t n_planned = 1;
};

// n is a multiple of `planned`: the same multiple of `actual`.
inline void rescale(int64_t& n, int64_t actual, int64_t planned) { n = n / planned * actual; }

inline void take_rows(QuantizeArgs& a, int64_t n, int64_t planned) { rescale(a.n_rows, n, planned); }
inline void take_rows(NormArgs& a, int64_t n, int64_t planned) { rescale(a.n_rows, n, planned); }
inline void take_rows(MatMulArgs& a, int64_t n, int64_t planned) { rescale(a.n_tokens, n, planned); }
inline void take_rows(RopeTableArgs& a, int64_t n, int64_t planned) { rescale(a.n_tokens, n, planned); }
inline void take_rows(RopeArgs& a, int64_t n, int64_t planned) { rescale(a.n_tokens, n, planned); }
inline void take_rows(HadamardArgs& a, int64_t n, int64_t planned) { rescale(a.n_rows, n, planned); }
inline void take_rows(BinaryArgs& a, int64_t n, int64_t planned) { rescale(a.n, n, planned); }
inline void take_rows(UnaryArgs& a, int64_t n, int64_t planned) { rescale(a.n, n, planned); }
inline void take_rows(SoftmaxArgs& a, int64_t n, int64_t planned) { rescale(a.n_rows, n, planned); }
inline void take_rows(GatherArgs& a, int64_t n, int64_t planned) { rescale(a.n_ids, n, planned); }
inline void take_rows(LocalIdsArgs& a, int64_t n, int64_t planned) { rescale(a.n, n, planned); }
inline void take_rows(CacheWriteArgs& a, int64_t n, int64_t planned) { rescale(a.n_tokens, n, planned); }
inline void take_rows(AttentionArgs& a, int64_t n, int64_t planned) { rescale(a.n_tokens, n, planned); }
inline void take_rows(RouteArgs& a, int64_t n, int64_t planned) { rescale(a.n_tokens, n, planned); }
inline void take_rows(RouteWeightsArgs& a, int64_t n, int64_t planned) { rescale(a.n_tokens, n, planned); }
inline void take_rows(ExpertGroupArgs& a, int64_t n, int64_t planned) { rescale(a.n_ids, n, planned); }
inline void take_rows(ExpertSumArgs& a, int64_t n, int64_t planned) { rescale(a.n_tokens, n, planned); }
inline void take_rows(ExpertGatherArgs&, int64_t, int64_t) {}  // expert_group has set the number of rows
inline void take_rows(ExpertMatMulArgs&, int64_t, int64_t) {}
inline void take_rows(CausalConvArgs&, int64_t, int64_t) {}  // the batch's sequences have the numbers of rows
inline void take_rows(DeltaNetArgs&, int64_t, int64_t) {}
inline void take_rows(CopyArgs&, int64_t, int64_t) {}  // copies any axes: all rows, including padding rows

}  // namespace motley
