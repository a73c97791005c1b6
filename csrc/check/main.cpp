// Runs every kernel on odd shapes, for every instruction set and with several threads. Built with sanitizers by
// `make sanitize`: memory is allocated to the byte, so that a read behind an end is found. What kernels compute is
// tested from Python; here results only have to agree between one token and many, and between instruction sets.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "../dispatch.hpp"
#include "../program.hpp"
#include "../team.hpp"

using namespace motley;

namespace {

std::mt19937 rng(1);

std::vector<float> random_floats(size_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> values(n);
    for (auto& v : values) v = normal(rng);
    return values;
}

void require(bool condition, const char* what, const std::string& where) {
    if (condition) return;
    std::fprintf(stderr, "%s: %s\n", where.c_str(), what);
    std::exit(1);
}

bool is_close(float a, float b, float tolerance) { return std::fabs(a - b) <= tolerance * (1.0f + std::fabs(b)); }

struct FormatShape {
    int format, columns, bytes;
};
constexpr FormatShape kFormats[] = {
    {kF32, 2, 8},       {kF16, 2, 4},       {kBF16, 2, 4},      {kQ8_0, 32, 34},    {kQ4_0, 32, 18},
    {kQ4_1, 32, 20},    {kQ5_0, 32, 22},    {kQ5_1, 32, 24},    {kQ2_K, 256, 84},   {kQ3_K, 256, 110},
    {kQ4_K, 256, 144},  {kQ5_K, 256, 176},  {kQ6_K, 256, 210},  {kIQ4_NL, 32, 18},  {kIQ4_XS, 256, 136},
};

struct Quantized {
    std::vector<int8_t> codes;
    std::vector<float> scales, sums, half_sums;
    Quantized(int64_t rows, int64_t columns)
        : codes(rows * columns), scales(rows * columns / 32), sums(rows * columns / 32), half_sums(rows * columns / 16) {}
    Rows view(const std::vector<float>& x, int64_t columns) {
        return {x.data(), columns, codes.data(), scales.data(), sums.data(), half_sums.data()};
    }
};

// Random bytes are weights, but their scales must be ordinary numbers: float16 with a small exponent.
std::vector<uint8_t> random_weight(const FormatShape& shape, int64_t rows, int64_t blocks) {
    std::vector<uint8_t> data(rows * blocks * shape.bytes);
    for (size_t i = 0; i < data.size(); i++) data[i] = i % 2 ? rng() % 64 : rng() % 256;
    return data;
}

void check_matmul(Pool& pool, const FormatShape& shape) {
    const int64_t n_rows = 35, n_tokens = 7, n_blocks = shape.columns == 2 ? 23 : 3, n_columns = n_blocks * shape.columns;
    const int64_t row_bytes = n_blocks * shape.bytes;
    const auto source = random_weight(shape, n_rows, n_blocks);
    std::vector<uint8_t> weight(48 * row_bytes);
    pool.run_kernel(pool.kernels().repack, RepackArgs{source.data(), weight.data(), shape.format, n_rows, n_columns, row_bytes});
    std::vector<float> unpacked(n_rows * n_columns), gathered(n_rows * n_columns);
    pool.run_kernel(pool.kernels().unpack, UnpackArgs{weight.data(), unpacked.data(), shape.format, n_rows, n_columns});
    std::vector<int32_t> ids(n_rows);
    for (int64_t i = 0; i < n_rows; i++) ids[i] = static_cast<int32_t>(i);
    pool.run_kernel(pool.kernels().gather, GatherArgs{source.data(), shape.format, row_bytes, n_rows, ids.data(), n_rows, n_columns, gathered.data()});
    const std::string where = std::string(pool.kernels().name) + " format " + std::to_string(shape.format);
    for (size_t i = 0; i < unpacked.size(); i++)
        require(unpacked[i] == gathered[i] || std::isnan(unpacked[i]), "rows by id differ from rows repacked", where);

    const auto x = random_floats(n_tokens * n_columns), bias = random_floats(n_rows), residual = random_floats(n_tokens * n_rows);
    for (const bool is_exact : {false, true}) {
        std::vector<float> many(n_tokens * n_rows), one(n_rows), gated(n_tokens * n_rows);
        Quantized q(n_tokens, n_columns);
        if (shape.columns != 2) pool.run_kernel(pool.kernels().quantize, QuantizeArgs{q.view(x, n_columns), n_tokens, n_columns});
        MatMulArgs args{q.view(x, n_columns), n_tokens, n_columns, 1, {}, kNoFunction, is_exact};
        args.parts[0] = {weight.data(), shape.format, n_rows, bias.data(), residual.data(), many.data(), n_rows};
        pool.run_kernel(pool.kernels().matmul, args);
        args.n_tokens = 1;
        args.parts[0].out = one.data();
        pool.run_kernel(pool.kernels().matmul, args);
        for (int64_t i = 0; i < n_rows; i++)
            require(is_close(one[i], many[i], 1e-2f) || std::isnan(one[i]) || std::isinf(one[i]), "one token differs from many", where);
        args.n_parts = 2;
        args.gate = kSilu;
        args.parts[0] = args.parts[1] = {weight.data(), shape.format, n_rows, nullptr, nullptr, gated.data(), n_rows};
        for (const int64_t n : {int64_t{1}, n_tokens}) {
            args.n_tokens = n;
            pool.run_kernel(pool.kernels().matmul, args);
        }
    }
}

// Planes of one store, to the byte.
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

void check_attention(Pool& pool, int kind, int64_t block_size) {
    const int64_t n_keys = 300, n_tokens = 5, n_heads = 6, dim = 48, n_blocks = (n_keys + block_size - 1) / block_size;
    const CacheShape shape{2, dim, 2, block_size};
    Planes k(kind, n_blocks * 4 * 2 * block_size), v(kind, n_blocks * 4 * 2 * block_size);
    std::vector<int32_t> blocks(n_blocks);
    for (int64_t i = 0; i < n_blocks; i++) blocks[i] = static_cast<int32_t>(n_blocks - 1 - i);
    std::vector<int64_t> slots(n_keys);
    for (int64_t i = 0; i < n_keys; i++) slots[i] = blocks[i / block_size] * block_size + i % block_size;
    const SequenceView sequence{0, n_tokens, n_keys - n_tokens, 0, blocks.data()};
    const BatchView batch{slots.data(), &sequence, 1};
    const auto keys = random_floats(n_keys * 2 * dim), values = random_floats(n_keys * 2 * dim), q = random_floats(n_tokens * n_heads * dim);
    pool.run_kernel(pool.kernels().cache_write, CacheWriteArgs{keys.data(), values.data(), n_keys, shape, k.view(kind), v.view(kind), 0, 16, &batch});
    std::vector<float> whole(q.size()), split(q.size()), partial(n_tokens * n_heads * (dim + 2) * 16);
    AttentionArgs args{q.data(), whole.data(), n_tokens, n_heads, shape, k.view(kind), v.view(kind), 0.125f, 100, 16, &batch, nullptr, 0, 1};
    pool.run_kernel(pool.kernels().attention, args);
    args.out = split.data();
    args.partial = partial.data();
    args.n_partial = static_cast<int64_t>(partial.size());
    args.n_threads = 8;
    pool.run_kernel(pool.kernels().attention, args);
    pool.run_kernel(pool.kernels().attention_join, args);
    for (size_t i = 0; i < q.size(); i++)
        require(is_close(split[i], whole[i], 1e-4f), "a split sequence differs from a whole one",
                std::string(pool.kernels().name) + " cache type " + std::to_string(kind));
}

void check_rows(Pool& pool) {
    const int64_t n = 3, columns = 77;
    const auto x = random_floats(n * columns), w = random_floats(columns);
    std::vector<float> out(n * columns);
    const Kernels& kernels = pool.kernels();
    pool.run_kernel(kernels.norm, NormArgs{x.data(), w.data(), out.data(), {}, n, columns, 1e-5f});
    pool.run_kernel(kernels.softmax, SoftmaxArgs{x.data(), out.data(), n, columns});
    pool.run_kernel(kernels.binary, BinaryArgs{x.data(), w.data(), out.data(), n * columns, columns, 1, true});
    pool.run_kernel(kernels.binary, BinaryArgs{x.data(), w.data(), out.data(), n * columns, n, columns, false});
    for (const int function : {kNoFunction, kSilu, kGelu, kGeluTanh, kRelu, kSigmoid, kTanh})
        pool.run_kernel(kernels.unary, UnaryArgs{x.data(), out.data(), n * columns, function, 2.0f});
    pool.run_kernel(kernels.copy, CopyArgs{x.data(), out.data(), {1, 1, columns, n}, {0, 0, 1, columns}, {0, 0, n, 1}});
    const auto turned = random_floats(3 * 2 * 64);
    std::vector<float> table(3 * 16 * 2), result(turned.size());
    const std::vector<int32_t> positions{0, 7, 100000};
    pool.run_kernel(kernels.rope_table, RopeTableArgs{positions.data(), w.data(), table.data(), 3, 16, 1.0f});
    for (const bool is_interleaved : {false, true})
        pool.run_kernel(kernels.rope, RopeArgs{turned.data(), result.data(), table.data(), 3, 2, 64, 16, is_interleaved, 32});
    pool.run_kernel(kernels.hadamard, HadamardArgs{turned.data(), result.data(), 6, 64});
}

// Devices that add up, many times over, each with threads of its own.
void check_group() {
    constexpr int kDevices = 3, kRounds = 50, kValues = 20000;
    auto group = std::make_shared<Group>(kDevices);
    std::vector<std::vector<float>> parts, sums(kDevices, std::vector<float>(kValues));
    std::vector<std::unique_ptr<Program>> programs;
    std::vector<Program*> members;
    for (int d = 0; d < kDevices; d++) {
        parts.emplace_back(kValues, static_cast<float>(d + 1));
        programs.push_back(std::make_unique<Program>(std::make_shared<Pool>(2, "", std::vector<int>{})));
        programs[d]->add_all_reduce(group, d, parts[d].data(), sums[d].data(), kValues);
        members.push_back(programs[d].get());
    }
    float heard[2] = {};
    programs[0]->add_send(group, 0, 2, parts[0].data(), 1);
    programs[2]->add_receive(group, 2, 0, &heard[0]);
    programs[2]->add_send(group, 2, 1, heard, 1);
    programs[1]->add_receive(group, 1, 2, &heard[1]);
    Team team(kDevices);
    for (int i = 0; i < kRounds; i++) {
        for (auto& sum : sums) sum.assign(kValues, 0.0f);
        team.run(members);
        for (const auto& sum : sums) require(sum[0] == 6.0f && sum[kValues - 1] == 6.0f, "wrong sum", "group");
        require(heard[0] == 1.0f && heard[1] == 1.0f, "wrong mail", "group");
    }
}

}  // namespace

int main() {
    for (const auto& name : instruction_sets()) {
        Pool pool(3, name, {});
        for (const auto& shape : kFormats) check_matmul(pool, shape);
        for (int kind = kCacheF32; kind <= kCacheIQ4_NL; kind++)
            for (const int64_t block_size : {int64_t{16}, int64_t{5}}) check_attention(pool, kind, block_size);
        check_rows(pool);
        std::printf("%s: all kernels run\n", name.c_str());
    }
    check_group();
    std::puts("devices meet");
    return 0;
}
