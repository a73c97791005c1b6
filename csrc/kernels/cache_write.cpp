// Keys and values of a batch into the cache: (rotate,) quantize and write in one pass.
//
// A head's dims are divided into tiles of 32, each with its own scale. The rules are those of motley.formats.planar
// (and ggml): which value is on the grid's end, how ties round, and that a tile with a NaN or an infinity becomes NaN
// as a whole.
#include "cache_types.hpp"
#include "hadamard.hpp"

namespace motley::MOTLEY_ISA {
namespace {

static_assert(kMaxHeadDim * sizeof(float) <= kScratchBytes);

constexpr float kLargest = 8388608.0f;  // 2^23: larger values cannot be stored, and sums stay finite

struct Cell {  // the destination of a token's tile
    uint8_t* codes;
    uint8_t* high_bits;
    uint16_t* scale;
    uint16_t* minimum;
};

// The cells of a token's head, one in each tile.
class Cells {
public:
    Cells(const CacheStoreView& store, const CacheShape& shape, int64_t slot, int64_t head) : store_(store), block_size_(shape.block_size) {
        const int64_t row = slot / block_size_ * store.n_rows + store.first_row + head;
        first_ = row * shape.n_tiles * block_size_ + slot % block_size_;
    }
    Cell at(int64_t tile) const {
        const int64_t i = first_ + tile * block_size_;
        return {store_.codes + i * shape_of(store_.kind).code_bytes, store_.high_bits ? store_.high_bits + 4 * i : nullptr,
                store_.scale ? store_.scale + i : nullptr, store_.minimum ? store_.minimum + i : nullptr};
    }

private:
    const CacheStoreView& store_;
    const int64_t block_size_;
    int64_t first_;
};

uint16_t saturated_half(float x) { return float_to_half(x > 65504.0f ? 65504.0f : (x < -65504.0f ? -65504.0f : x)); }

float reciprocal(float x) {
    const float inverse = 1.0f / x;
    return std::isfinite(inverse) ? inverse : 0.0f;
}

float farthest_from_zero(const float* x) {
    float extreme = x[0];
    for (int i = 1; i < kTile; i++)
        if (std::fabs(x[i]) > std::fabs(extreme)) extreme = x[i];
    return extreme;
}

int clamp(float x, int highest) { return x < 0 ? 0 : (x > static_cast<float>(highest) ? highest : static_cast<int>(x)); }

// Codes 0 … highest of a uniform grid; ties round up.
void uniform_codes(const float* x, float minus, float inverse, float shift, int highest, uint8_t* codes) {
    for (int i = 0; i < kTile; i++) codes[i] = static_cast<uint8_t>(clamp(std::floor((x[i] - minus) * inverse + shift), highest));
}

constexpr int8_t kLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

uint8_t nearest_level(float x) {
    const float half_steps = std::floor((x + 127.0f) * 2.0f);  // midpoints of levels are borders of half steps
    const float v = (half_steps < 0 ? 0 : (half_steps > 480 ? 480 : half_steps)) / 2.0f - 127.0f;
    uint8_t code = 0;
    while (code < 15 && v >= (kLevels[code] + kLevels[code + 1]) / 2.0f) code++;
    return code;
}

// The scale is fitted again, by least squares, once the codes are known.
float iq4_codes(const float* x, float inverse, uint8_t* codes) {
    float product = 0, square = 0;
    for (int i = 0; i < kTile; i++) {
        codes[i] = nearest_level(x[i] * inverse);
        const float level = kLevels[codes[i]];
        product += x[i] * level;
        square += level * level;
    }
    return product * reciprocal(square);
}

void write_q8(const float* x, Cell cell, bool is_finite) {
    float most = 0;
    for (int i = 0; i < kTile; i++) most = std::fabs(x[i]) > most ? std::fabs(x[i]) : most;
    const float scale = most / 127.0f, inverse = reciprocal(scale);
    for (int i = 0; i < kTile; i++) {
        const float size = std::fabs(x[i] * inverse), whole = std::floor(size);
        const float rounded = size - whole >= 0.5f ? whole + 1.0f : whole;  // ties away from zero
        const int code = rounded > 127.0f ? 127 : static_cast<int>(rounded);
        cell.codes[i] = static_cast<uint8_t>(x[i] < 0 ? -code : code);
    }
    *cell.scale = is_finite ? saturated_half(scale) : 0x7e00;
}

void write_narrow(int kind, const float* x, Cell cell, bool is_finite) {
    uint8_t codes[kTile];
    float scale, minimum = 0;
    switch (kind) {
        case kCacheQ4_1:
        case kCacheQ5_1: {
            const int highest = kind == kCacheQ5_1 ? 31 : 15;
            float low = x[0], high = x[0];
            for (int i = 1; i < kTile; i++) {
                low = x[i] < low ? x[i] : low;
                high = x[i] > high ? x[i] : high;
            }
            scale = (high - low) / static_cast<float>(highest);
            minimum = low;
            uniform_codes(x, minimum, reciprocal(scale), 0.5f, highest, codes);
            break;
        }
        case kCacheIQ4_NL:
            scale = iq4_codes(x, reciprocal(farthest_from_zero(x) / -127.0f), codes);
            break;
        default: {
            const int lowest = kind == kCacheQ5_0 ? 16 : 8;
            scale = farthest_from_zero(x) / static_cast<float>(-lowest);
            uniform_codes(x, 0.0f, reciprocal(scale), static_cast<float>(lowest) + 0.5f, 2 * lowest - 1, codes);
        }
    }
    uint32_t fifth = 0;
    for (int i = 0; i < kTile; i++) fifth |= static_cast<uint32_t>(codes[i] >> 4) << i;
    for (int i = 0; i < 16; i++) cell.codes[i] = static_cast<uint8_t>((codes[i] & 15) | (codes[i + 16] & 15) << 4);
    if (cell.high_bits) std::memcpy(cell.high_bits, &fifth, 4);
    *cell.scale = is_finite ? saturated_half(scale) : 0x7e00;
    if (cell.minimum) *cell.minimum = saturated_half(minimum);
}

void write_plain(int kind, const float* x, uint8_t* out) {
    if (kind == kCacheF32) {
        std::memcpy(out, x, kTile * sizeof(float));
        return;
    }
    if (kind == kCacheF16) {
        for (int i = 0; i < kTile; i += kLanes) store(out + 2 * i, floats_to_half(load<f32v>(x + i)));
        return;
    }
    for (int i = 0; i < kTile; i++) {
        const uint16_t value = float_to_bf16(x[i]);
        std::memcpy(out + 2 * i, &value, 2);
    }
}

void write_tile(int kind, float* x, Cell cell) {
    if (is_float_kind(kind)) return write_plain(kind, x, cell.codes);
    bool is_finite = true;
    for (int i = 0; i < kTile; i++) is_finite = is_finite && std::isfinite(x[i]);
    for (int i = 0; i < kTile; i++) x[i] = is_finite ? (x[i] > kLargest ? kLargest : (x[i] < -kLargest ? -kLargest : x[i])) : 0;
    if (kind == kCacheQ8_0) return write_q8(x, cell, is_finite);
    write_narrow(kind, x, cell, is_finite);
}

void write_token(const CacheWriteArgs& a, const CacheStoreView& store, const float* x, int rotation, int64_t token,
                 float* head) {
    for (int64_t h = 0; h < a.shape.n_heads; h++) {
        const float* const own = x + (token * a.shape.n_heads + h) * a.shape.dim;
        const Cells cells(store, a.shape, a.batch->slots[token], h);
        if (is_float_kind(store.kind) && !rotation && a.shape.dim % kTile == 0) {
            for (int64_t tile = 0; tile < a.shape.n_tiles; tile++) write_plain(store.kind, own + tile * kTile, cells.at(tile).codes);
            continue;
        }
        std::memset(head, 0, a.shape.n_tiles * kTile * sizeof(float));
        std::memcpy(head, own, a.shape.dim * sizeof(float));
        if (rotation) hadamard_stretches(head, a.shape.dim, rotation);
        for (int64_t tile = 0; tile < a.shape.n_tiles; tile++) write_tile(store.kind, head + tile * kTile, cells.at(tile));
    }
}

}  // namespace

void cache_write(const CacheWriteArgs& a, const Worker& worker) {
    float* head = reinterpret_cast<float*>(worker.scratch);
    for (int64_t task; (task = worker.take()) < 2 * a.n_tokens;) {
        const int64_t token = task / 2;
        if (task % 2)
            write_token(a, a.v, a.values, a.v_rotation, token, head);
        else
            write_token(a, a.k, a.keys, a.k_rotation, token, head);
    }
}

}  // namespace motley::MOTLEY_ISA
