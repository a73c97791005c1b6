// The table of this instruction set's kernels.
#include "../kernels.hpp"

#define MOTLEY_TEXT(x) #x
#define MOTLEY_STRING(x) MOTLEY_TEXT(x)

namespace motley::MOTLEY_ISA {

void quantize(const QuantizeArgs&, const Worker&);
void norm(const NormArgs&, const Worker&);
void matmul(const MatMulArgs&, const Worker&);
void rope_table(const RopeTableArgs&, const Worker&);
void rope(const RopeArgs&, const Worker&);
void hadamard_rows(const HadamardArgs&, const Worker&);
void binary(const BinaryArgs&, const Worker&);
void unary(const UnaryArgs&, const Worker&);
void softmax(const SoftmaxArgs&, const Worker&);
void copy(const CopyArgs&, const Worker&);
void gather(const GatherArgs&, const Worker&);
void local_ids(const LocalIdsArgs&, const Worker&);
void repack(const RepackArgs&, const Worker&);
void unpack(const UnpackArgs&, const Worker&);
void cache_write(const CacheWriteArgs&, const Worker&);
void attention(const AttentionArgs&, const Worker&);
void attention_join(const AttentionArgs&, const Worker&);
void route(const RouteArgs&, const Worker&);
void route_weights(const RouteWeightsArgs&, const Worker&);
void expert_group(const ExpertGroupArgs&, const Worker&);
void expert_gather(const ExpertGatherArgs&, const Worker&);
void expert_matmul(const ExpertMatMulArgs&, const Worker&);
void expert_sum(const ExpertSumArgs&, const Worker&);
void causal_conv(const CausalConvArgs&, const Worker&);
void delta_net(const DeltaNetArgs&, const Worker&);
void delta_pending(const DeltaNetArgs&, const Worker&);
void peaks(const float*, int64_t, int32_t*);

extern const Kernels table;
const Kernels table = {
    MOTLEY_STRING(MOTLEY_ISA), quantize, norm, matmul, rope_table, rope, hadamard_rows, binary, unary, softmax, copy,
    gather, local_ids, repack, unpack, cache_write, attention, attention_join,
    route, route_weights, expert_group, expert_gather, expert_matmul, expert_sum,
    causal_conv, delta_net, delta_pending, peaks,
};

}  // namespace motley::MOTLEY_ISA
