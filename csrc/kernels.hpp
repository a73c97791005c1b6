// Arguments of kernels: plain pointers, sizes and strides (in values, not bytes). Values are float32 unless noted.
//
// A kernel is run by all threads of a pool at once. Its work is divided into tasks that threads take dynamically;
// `Worker::take` returns the next task's number. The same sources are compiled once for each instruction set, see
// dispatch.hpp.
#pragma once
#include <atomic>
#include <cstdint>

namespace motley {

struct Worker {
    int thread, n_threads;
    std::atomic<int64_t>* next;  // the next task of this kernel call
    uint8_t* scratch;            // this thread's own, kScratchBytes of it, aligned to 64
    int64_t take(int64_t n = 1) const { return next->fetch_add(n, std::memory_order_relaxed); }
};

constexpr int64_t kScratchBytes = 1 << 20;

// Limits of the kernels' scratch memory. Programs reject larger sizes (`require_cache_shape` in module.cpp); before
// that, the predicates of backends/cpu/kernels.py choose another kernel.
constexpr int64_t kMaxHeadDim = 512;
constexpr int64_t kMaxQueryGroup = 64;  // query heads that share a KV head

enum Format { kF32, kF16, kBF16, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ2_K, kQ3_K, kQ4_K, kQ5_K, kQ6_K, kIQ4_NL, kIQ4_XS, kMXFP4,
              kQ8_0Rows,  // in the file's layout, see rows.hpp; all others are repacked, see formats.hpp
              kNumFormats };
enum Function { kNoFunction, kSilu, kGelu, kGeluTanh, kRelu, kSigmoid, kTanh, kClampedSwiglu, kSoftplus };

// Rows of activations; for matrix products also as int8 codes, a scale for each 32 columns, the sums of scale · code over
// 32 and over 16 columns, and the sums of codes over 16 columns. One allocation, see quantized_bytes.
struct Rows {
    const float* values;
    int64_t stride;  // between rows of `values`
    int8_t* codes;
    float* scales;
    float* sums;
    float* half_sums;
    int32_t* code_sums;
};

struct QuantizeArgs {
    Rows x;
    int64_t n_rows, n_columns;
};

struct NormArgs {
    const float* x;
    const float* weight;  // may be null
    float* out;           // may be null if only the quantized rows are needed
    Rows quantized;       // codes may be null
    int64_t n_rows, n_columns;
    float eps;
};

// How one token's product reads its weights. The fastest pattern depends on the processor, see patterns.py.
struct ReadPattern {
    int streams = 1;       // groups of rows that a thread reads side by side, up to kMaxStreams
    int fetch_ahead = 0;   // bytes from the current read to the prefetch; 0: hardware prefetching only
    int first_share = 75;  // percent of its even share that a thread takes in one piece; the rest is in smaller pieces
    bool is_once = false;  // prefetches are non-temporal: weights are read once a token, so caches need not keep them
};

constexpr int kMaxStreams = 8;

struct MatMulPart {
    const uint8_t* weight;  // in groups of rows, see formats.hpp
    int format;
    int64_t n_rows;         // rows of the weight, columns of the result
    const float* bias;      // (n_rows,), may be null
    const float* residual;  // like the result, may be null
    float* out;
    int64_t out_stride;
    ReadPattern pattern = {};
};

constexpr int kMaxParts = 4;

// out = x · Wᵀ (+ bias) (+ residual) for each part. With a gate there are two parts of one shape, and the first
// one's result is gate(first) · second.
struct MatMulArgs {
    Rows x;
    int64_t n_tokens, n_columns;
    int n_parts;
    MatMulPart parts[kMaxParts];
    int gate;
    bool is_exact;  // float activations for every format
};

struct RopeTableArgs {
    const int32_t* positions;
    const float* frequencies;  // (n_pairs,)
    float* table;              // (tokens, n_pairs) of cosine and sine
    int64_t n_tokens, n_pairs;
    float magnitude;
};

struct RopeArgs {
    const float* x;  // (tokens, heads, dim)
    float* out;
    const float* table;
    int64_t n_tokens, n_heads, dim, n_pairs;
    bool is_interleaved;
    int rotation;  // size of the Hadamard transform that follows; 0: none
};

struct HadamardArgs {
    const float* x;
    float* out;
    int64_t n_rows;  // of `size`
    int size;
};

struct BinaryArgs {  // out = a + b or a · b; b repeats every `b_inner` values, and each of its values b_repeat times
    const float* a;
    const float* b;
    float* out;
    int64_t n, b_inner, b_repeat;
    bool is_product;
};

struct UnaryArgs {
    const float* x;
    float* out;
    int64_t n;
    int function;
    float factor;  // if function is kNoFunction
};

struct SoftmaxArgs {
    const float* x;
    float* out;
    int64_t n_rows, n_columns;
};

struct CopyArgs {  // four axes, the last one innermost; source null: zeros
    const float* source;
    float* out;
    int64_t shape[4], source_stride[4], out_stride[4];
};

struct GatherArgs {
    const uint8_t* table;  // rows in GGUF's own layout
    int format;
    int64_t row_bytes, n_table_rows;
    const int32_t* ids;  // -1: a row of zeros
    int64_t n_ids, n_columns;
    float* out;
};

constexpr int kMaxRanges = 32;

struct LocalIdsArgs {  // an id within range r becomes its distance from the ranges' beginning; -1 outside of all
    const int32_t* ids;
    int32_t* out;
    int64_t n;
    int n_ranges;
    int64_t start[kMaxRanges], stop[kMaxRanges];
};

struct RepackArgs {
    const uint8_t* source;  // rows in GGUF's own layout
    uint8_t* out;
    int format;
    int64_t n_rows, n_columns, row_bytes;
};

struct UnpackArgs {
    const uint8_t* weight;  // repacked
    float* out;
    int format;
    int64_t n_rows, n_columns;
};

// The KV cache. A plane holds (block, row, tile, token, width), see kvcache/store.py.
enum CacheKind { kCacheF32, kCacheF16, kCacheBF16, kCacheQ8_0, kCacheQ5_1, kCacheQ5_0, kCacheQ4_1, kCacheQ4_0, kCacheIQ4_NL };

struct CacheStoreView {
    int kind;
    uint8_t* codes;      // or values
    uint8_t* high_bits;  // if codes have five bits
    uint16_t* scale;     // if the cache is quantized
    uint16_t* minimum;
    int64_t n_rows;  // of the whole plane
    int64_t first_row;
};

struct CacheShape {
    int64_t n_heads, dim, n_tiles, block_size;
};

// One sequence of a batch in one group of layers. Key i is at position first + i, in slot
// blocks[i / block_size] · block_size + i % block_size.
//
// The rows may be a tree: then bit j of seen[i] says whether row i sees row j, an ancestor or itself, and row i has the
// position of its depth. Its key is still key position - first + i.
constexpr int kMaxTreeRows = 64;

struct SequenceView {
    int64_t first_token, n_tokens;  // rows of the batch
    int64_t position;               // of its first row; the others follow
    int64_t first;
    const int32_t* blocks;
    const uint64_t* seen = nullptr;  // (rows,) of a tree; null: each row sees all before it
};

// The batch's slots and sequences in one group of layers. Its contents change from run to run, its address does not.
struct BatchView {
    const int64_t* slots;  // (tokens,)
    const SequenceView* sequences;
    int64_t n_sequences;
};

struct CacheWriteArgs {
    const float* keys;  // (tokens, heads, dim)
    const float* values;
    int64_t n_tokens;
    CacheShape shape;
    CacheStoreView k, v;
    int k_rotation, v_rotation;
    const BatchView* batch;
};

struct AttentionArgs {
    const float* q;  // (tokens, heads, dim)
    float* out;
    int64_t n_tokens, n_heads;
    CacheShape shape;
    CacheStoreView k, v;
    float scale;
    int64_t window;  // 0: none
    int out_rotation;
    const BatchView* batch;
    float* partial;  // buffer for the partial results of a sequence's splits, see attention_bytes
    int64_t n_partial;
    int n_threads;  // the number of tasks depends on it; the same in attention and attention_join
    const float* sinks;  // (heads,): one more score, without a value; may be null
};

// Mixture of experts, see kernels/experts.cpp.
constexpr int kMaxExpertGroups = 64;

struct RouteArgs {
    const float* logits;    // (tokens, experts)
    const int32_t* n_used;  // (tokens,)
    const float* bias;      // (experts,), may be null
    int32_t* ids;           // (tokens, k)
    int64_t n_tokens, n_experts, k, n_groups, n_groups_used;
    bool is_sigmoid;
};

struct RouteWeightsArgs {
    const float* logits;
    const int32_t* ids;
    float* out;  // (tokens, k)
    int64_t n_tokens, n_experts, k;
    bool is_sigmoid, normalizes;
    float scale;
};

// The places of the rows of (token, expert) pairs: those of expert e are bounds[e] … bounds[e + 1].
struct ExpertPlaces {
    int32_t* bounds;             // (experts + 1,)
    int32_t* place_of;           // (tokens · k,): -1 for an id of -1
    int32_t* id_at;              // (tokens · k,): which of the ids a place is for
    std::atomic<int64_t>* next;  // (2, experts): the next task of each expert's two products
    int64_t n_experts;
};

struct ExpertGroupArgs {
    const int32_t* ids;
    int64_t n_ids;
    ExpertPlaces places;
};

struct ExpertGatherArgs {
    Rows x;    // a row for each token
    Rows out;  // a row for each place; values may be null if only the quantized rows are needed
    int64_t n_columns, k;
    ExpertPlaces places;
};

// `product` is the product of the first expert with all rows; the other experts' weights follow at weight_stride.
struct ExpertMatMulArgs {
    MatMulArgs product;
    int64_t weight_stride[kMaxParts];  // bytes
    int pass;                          // 0: gate and up, 1: down
    ExpertPlaces places;
};

struct ExpertSumArgs {
    const float* rows;      // (places, columns)
    const float* weights;   // (tokens, k)
    const float* residual;  // (tokens, columns), may be null
    float* out;
    int64_t n_tokens, n_columns, k;
    ExpertPlaces places;
};

// Recurrent states, see kernels/recurrent.cpp and kvcache/states.py. One sequence's rows of a batch, and where its state
// is read and written. The inputs of position p are in a ring at p mod n_pending.
struct StateSpan {
    int64_t first_row, n_rows;
    int64_t position;       // of the first row
    int64_t source;         // slot of the state that includes n_read tokens; -1: zeros
    int64_t n_read;
    int64_t source_ring;    // of the tokens from n_read to position
    int64_t target;         // slot for the state that includes n_written tokens
    int64_t n_written;
    int64_t target_ring;    // for the rows from n_written on
};

// The batch's sequences. Its contents change from run to run, its address does not.
struct StateBatchView {
    const StateSpan* spans;
    int64_t n_spans;
};

// The slots and rings of one part of a layer's state.
struct StateStore {
    void* states;  // (slots, …): float32, or bfloat16
    bool is_bf16;
    float* rings;  // (rings, n_pending, …)
    int64_t n_pending;
    const StateBatchView* batch;
};

struct CausalConvArgs {
    const float* x;       // (tokens, channels)
    const float* weight;  // (taps, channels)
    float* out;
    int64_t n_channels, n_taps;
    StateStore store;  // a state is (taps - 1, channels), a pending token (channels,)
};

constexpr int64_t kMaxTaps = 64;

struct DeltaNetArgs {
    const float* mixed;  // (tokens, q | k | v)
    const float* decay;  // (tokens, value heads)
    const float* beta;
    float* out;  // (tokens, value heads, value dim)
    int64_t n_key_heads, n_heads, key_dim, value_dim;
    float eps;
    bool is_cyclic;    // value head j uses key head j mod n_key_heads, not j / (n_heads / n_key_heads)
    StateStore store;  // a state is (value heads, key dim, value dim), a pending token (value heads, k | v | decay | beta)
};

struct Kernels {
    const char* name;
    void (*quantize)(const QuantizeArgs&, const Worker&);
    void (*norm)(const NormArgs&, const Worker&);
    void (*matmul)(const MatMulArgs&, const Worker&);
    void (*rope_table)(const RopeTableArgs&, const Worker&);
    void (*rope)(const RopeArgs&, const Worker&);
    void (*hadamard)(const HadamardArgs&, const Worker&);
    void (*binary)(const BinaryArgs&, const Worker&);
    void (*unary)(const UnaryArgs&, const Worker&);
    void (*softmax)(const SoftmaxArgs&, const Worker&);
    void (*copy)(const CopyArgs&, const Worker&);
    void (*gather)(const GatherArgs&, const Worker&);
    void (*local_ids)(const LocalIdsArgs&, const Worker&);
    void (*repack)(const RepackArgs&, const Worker&);
    void (*unpack)(const UnpackArgs&, const Worker&);
    void (*cache_write)(const CacheWriteArgs&, const Worker&);
    void (*attention)(const AttentionArgs&, const Worker&);
    void (*attention_join)(const AttentionArgs&, const Worker&);
    void (*route)(const RouteArgs&, const Worker&);
    void (*route_weights)(const RouteWeightsArgs&, const Worker&);
    void (*expert_group)(const ExpertGroupArgs&, const Worker&);
    void (*expert_gather)(const ExpertGatherArgs&, const Worker&);
    void (*expert_matmul)(const ExpertMatMulArgs&, const Worker&);
    void (*expert_sum)(const ExpertSumArgs&, const Worker&);
    void (*causal_conv)(const CausalConvArgs&, const Worker&);
    void (*delta_net)(const DeltaNetArgs&, const Worker&);
    void (*delta_pending)(const DeltaNetArgs&, const Worker&);
    void (*peaks)(const float* row, int64_t n, int32_t* out);  // see order.hpp; for one thread
};

}  // namespace motley
