// The KV cache: writing, and attention over it.
#include <cstring>

#include "check.hpp"
#include "reference.hpp"

namespace motley {
namespace {

// Planes of one store, allocated with their exact size.
struct Planes {
    std::vector<uint8_t> codes, high_bits;
    std::vector<uint16_t> scale, minimum;
    Planes(int kind, int64_t n_cells)
        : codes(n_cells * bytes_of(kind)), high_bits(n_cells * 4), scale(n_cells), minimum(n_cells) {}
    static int bytes_of(int kind) { return kind == kCacheF32 ? 128 : kind <= kCacheBF16 ? 64 : kind == kCacheQ8_0 ? 32 : 16; }
    CacheStoreView view(int kind) {
        const bool is_plain = kind <= kCacheBF16, has_five = kind == kCacheQ5_0 || kind == kCacheQ5_1;
        const bool has_minimum = kind == kCacheQ4_1 || kind == kCacheQ5_1;
        return {kind, codes.data(), has_five ? high_bits.data() : nullptr, is_plain ? nullptr : scale.data(),
                has_minimum ? minimum.data() : nullptr, 4, 2};
    }
};

constexpr int64_t kHeads = 2, kDim = 48, kTiles = 2, kKeys = 300, kPlaneRows = 4, kFirstRow = 2;

// The tokens' slots: blocks in reverse order.
struct Sequence {
    int64_t block_size;
    std::vector<int32_t> blocks;
    std::vector<int64_t> slots;

    explicit Sequence(int64_t size) : block_size(size), blocks((kKeys + size - 1) / size), slots(kKeys) {
        for (size_t i = 0; i < blocks.size(); i++) blocks[i] = static_cast<int32_t>(blocks.size() - 1 - i);
        for (int64_t i = 0; i < kKeys; i++) slots[i] = blocks[i / size] * size + i % size;
    }
    int64_t n_cells() const { return static_cast<int64_t>(blocks.size()) * kPlaneRows * kTiles * block_size; }
    int64_t cell(int64_t key, int64_t head, int64_t tile) const {
        const int64_t row = slots[key] / block_size * kPlaneRows + kFirstRow + head;
        return (row * kTiles + tile) * block_size + slots[key] % block_size;
    }
    double value(const CacheStoreView& store, int64_t key, int64_t head, int64_t d) const {
        return reference::cached(store, cell(key, head, d / 32), static_cast<int>(d % 32));
    }
};

// One head's values, its stretches of 16 rotated if `is_rotated`.
std::vector<double> head_of(const std::vector<float>& x, int64_t at, bool is_rotated) {
    std::vector<double> head(x.begin() + at, x.begin() + at + kDim);
    for (int64_t i = 0; is_rotated && i < kDim; i += 16) {
        const auto turned = reference::hadamard({head.begin() + i, head.begin() + i + 16});
        std::copy(turned.begin(), turned.end(), head.begin() + i);
    }
    return head;
}

void check_stored(const Sequence& sequence, const CacheStoreView& store, const std::vector<float>& x, bool is_rotated, const std::string& where) {
    for (int64_t key = 0; key < kKeys; key++)
        for (int64_t head = 0; head < kHeads; head++) {
            const auto expected = head_of(x, (key * kHeads + head) * kDim, is_rotated);
            for (int64_t d = 0; d < kDim; d++) {
                double largest = 0;
                for (int64_t i = d / 32 * 32; i < kDim && i < d / 32 * 32 + 32; i++) largest = std::max(largest, std::fabs(expected[i]));
                const double room = (reference::cache_precision(store.kind) + 1e-6) * largest;
                require(std::fabs(sequence.value(store, key, head, d) - expected[d]) <= room, "a stored value is too far off", where);
            }
        }
}

// softmax(scale · q·kᵀ)·v of one row, from the values that are stored; rotated back.
std::vector<double> attend(const Sequence& sequence, const AttentionArgs& a, int64_t token, int64_t head) {
    const int64_t base = kKeys - a.n_tokens, kv_head = head / (a.n_heads / kHeads);
    const uint64_t* seen = a.batch->sequences->seen;
    std::vector<int64_t> keys(base);
    for (int64_t i = 0; i < base; i++) keys[i] = i;
    for (int64_t i = 0; i <= token; i++)
        if (!seen || seen[token] >> i & 1) keys.push_back(base + i);  // in a tree, the row's own path
    keys.erase(keys.begin(), keys.end() - std::min<int64_t>(a.window, keys.size()));
    std::vector<double> out(kDim);
    double total = 0, largest = -INFINITY;
    std::vector<double> scores;
    for (const int64_t key : keys) {
        double score = 0;
        for (int64_t d = 0; d < kDim; d++) score += a.q[(token * a.n_heads + head) * kDim + d] * sequence.value(a.k, key, kv_head, d);
        scores.push_back(a.scale * score);
        largest = std::max(largest, scores.back());
    }
    for (size_t i = 0; i < keys.size(); i++) {
        const double p = std::exp(scores[i] - largest);
        total += p;
        for (int64_t d = 0; d < kDim; d++) out[d] += p * sequence.value(a.v, keys[i], kv_head, d);
    }
    if (a.sinks) total += std::exp(a.sinks[head] - largest);
    for (auto& value : out) value /= total;
    return head_of({out.begin(), out.end()}, 0, a.out_rotation != 0);
}

void check_rows(const Sequence& sequence, const AttentionArgs& a, const std::string& where) {
    // Queries are multiplied with quantized keys as 8-bit codes.
    const double tolerance = a.k.kind <= kCacheBF16 ? 1e-4 : 2e-2;
    for (int64_t token = 0; token < a.n_tokens; token++)
        for (int64_t head = 0; head < a.n_heads; head++) {
            const auto expected = attend(sequence, a, token, head);
            for (int64_t d = 0; d < kDim; d++)
                require(is_close(a.out[(token * a.n_heads + head) * kDim + d], expected[d], tolerance), "a wrong attention", where);
        }
}

}  // namespace

void check_attention(Pool& pool, int kind, int64_t block_size, bool has_sinks) {
    const int64_t n_tokens = 5, n_heads = 6;
    const std::string where = std::string(pool.kernels().name) + " cache type " + std::to_string(kind);
    const Sequence sequence(block_size);
    const CacheShape shape{kHeads, kDim, kTiles, block_size};
    Planes k(kind, sequence.n_cells()), v(kind, sequence.n_cells());
    const SequenceView view{0, n_tokens, kKeys - n_tokens, 0, sequence.blocks.data()};
    const BatchView batch{sequence.slots.data(), &view, 1};
    const auto keys = random_floats(kKeys * kHeads * kDim), values = random_floats(keys.size()), q = random_floats(n_tokens * n_heads * kDim);
    const auto sinks = random_floats(n_heads);
    pool.run_kernel(pool.kernels().cache_write, CacheWriteArgs{keys.data(), values.data(), kKeys, shape, k.view(kind), v.view(kind), 0, 16, &batch});
    check_stored(sequence, k.view(kind), keys, false, where);
    check_stored(sequence, v.view(kind), values, true, where);

    std::vector<float> whole(q.size()), split(q.size()), partial(n_tokens * n_heads * (kDim + 2) * 16);
    AttentionArgs args{q.data(), whole.data(), n_tokens, n_heads, shape, k.view(kind), v.view(kind), 0.125f, 100, 16, &batch, nullptr, 0, 1, nullptr};
    if (has_sinks) args.sinks = sinks.data();
    pool.run_kernel(pool.kernels().attention, args);
    check_rows(sequence, args, where);
    const std::vector<uint64_t> seen{0b1, 0b11, 0b101, 0b1011, 0b10101};  // two branches of two rows
    const SequenceView tree_view{0, n_tokens, kKeys - n_tokens, 0, sequence.blocks.data(), seen.data()};
    const BatchView tree_batch{sequence.slots.data(), &tree_view, 1};
    AttentionArgs tree = args;
    tree.out = split.data();
    tree.batch = &tree_batch;
    pool.run_kernel(pool.kernels().attention, tree);
    check_rows(sequence, tree, where);
    require(std::memcmp(split.data(), whole.data(), 2 * n_heads * kDim * sizeof(float)) == 0, "a row of a tree has other bits", where);
    for (const int64_t n : {int64_t{1}, int64_t{2}}) {  // the last rows without the ones before
        const SequenceView last{0, n, kKeys - n, 0, sequence.blocks.data()};
        const BatchView last_batch{sequence.slots.data(), &last, 1};
        AttentionArgs fewer = args;
        std::vector<float> own(n * n_heads * kDim);
        const int64_t skipped = static_cast<int64_t>(q.size() - own.size());
        fewer.q += skipped;
        fewer.out = own.data();
        fewer.n_tokens = n;
        fewer.batch = &last_batch;
        pool.run_kernel(pool.kernels().attention, fewer);
        require(std::memcmp(own.data(), whole.data() + skipped, own.size() * sizeof(float)) == 0, "a row depends on the number of rows", where);
    }
    args.out = split.data();
    args.partial = partial.data();
    args.n_partial = static_cast<int64_t>(partial.size());
    args.n_threads = 8;
    pool.run_kernel(pool.kernels().attention, args);
    pool.run_kernel(pool.kernels().attention_join, args);
    require(std::memcmp(split.data(), whole.data(), q.size() * sizeof(float)) == 0, "a split sequence has other bits than a whole one", where);
}

// The widest heads and groups that fit exactly into a thread's scratch memory.
void check_widest_heads(Pool& pool, int kind) {
    const int64_t n_keys = 20, dim = kMaxHeadDim, n_heads = kMaxQueryGroup, block_size = 16, n_blocks = 2;
    const CacheShape shape{1, dim, dim / 32, block_size};
    Planes k(kind, n_blocks * 4 * shape.n_tiles * block_size), v(kind, n_blocks * 4 * shape.n_tiles * block_size);
    const std::vector<int32_t> blocks{1, 0};
    std::vector<int64_t> slots(n_keys);
    for (int64_t i = 0; i < n_keys; i++) slots[i] = blocks[i / block_size] * block_size + i % block_size;
    const SequenceView sequence{0, 2, n_keys - 2, 0, blocks.data()};
    const BatchView batch{slots.data(), &sequence, 1};
    const auto keys = random_floats(n_keys * dim), q = random_floats(2 * n_heads * dim);
    pool.run_kernel(pool.kernels().cache_write, CacheWriteArgs{keys.data(), keys.data(), n_keys, shape, k.view(kind), v.view(kind), 512, 512, &batch});
    std::vector<float> out(q.size());
    pool.run_kernel(pool.kernels().attention, AttentionArgs{q.data(), out.data(), 2, n_heads, shape, k.view(kind), v.view(kind), 0.05f, 0, 512, &batch, nullptr, 0, 1, nullptr});
}

}  // namespace motley
