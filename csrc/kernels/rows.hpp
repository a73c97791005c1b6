// Q8_0 matrices in the file's layout, so that a mapped file needs no copy: rows of blocks, each a float16 scale and 32
// codes (int8). The number of rows is a multiple of kGroup.
//
//     y[row] = Σ over blocks  scale · dx · Σ code·xcode
//
// A product with one token reads the rows directly, a block of 32 columns in the lanes of a vector. That needs more
// instructions than groups (formats.hpp), and is as fast where memory bandwidth is the limit. Products with more tokens
// use panels, as for every other format.
#pragma once
#include "panel.hpp"
#include "transpose.hpp"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace motley::MOTLEY_ISA {

constexpr int kRowBlockBytes = Q8_0::kBytes;
constexpr int kRowsAtOnce = 4;

inline float row_scale(const uint8_t* block) {
    uint16_t half;
    std::memcpy(&half, block, 2);
    return half_to_float(half);
}

// Accumulates one row's products; the number of lanes depends on the instruction set.
#if defined(__AVX2__)
class RowSum {
public:
    [[gnu::always_inline]] void add(const uint8_t* block, const int8_t* codes, float scale, [[maybe_unused]] float sum) {
        const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 2));
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
        const float d = row_scale(block);
#if defined(MOTLEY_DOT_VNNI)
        const __m256i unsigned_w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
#if defined(__AVXVNNI__)
        const __m256i products = _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), unsigned_w, x);
#else
        const __m256i products = _mm256_dpbusd_epi32(_mm256_setzero_si256(), unsigned_w, x);
#endif
        added_ += d * sum;
#else
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
        const __m256i products = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
        total_ = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), _mm256_set1_ps(d * scale), total_);
    }
    float result() const {
        __m128 sum = _mm_add_ps(_mm256_castps256_ps128(total_), _mm256_extractf128_ps(total_, 1));
        sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
        return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum))) - 128.0f * added_;
    }

private:
    __m256 total_ = _mm256_setzero_ps();
    float added_ = 0;  // the error from adding 128 to codes, divided by 128
};
#elif defined(__ARM_FEATURE_DOTPROD)
class RowSum {
public:
    [[gnu::always_inline]] void add(const uint8_t* block, const int8_t* codes, float scale, float) {
        const auto* w = reinterpret_cast<const int8_t*>(block + 2);
        const int32x4_t low = vdotq_s32(vdupq_n_s32(0), vld1q_s8(w), vld1q_s8(codes));
        const int32x4_t products = vdotq_s32(low, vld1q_s8(w + 16), vld1q_s8(codes + 16));
        total_ = vfmaq_n_f32(total_, vcvtq_f32_s32(products), row_scale(block) * scale);
    }
    float result() const { return vaddvq_f32(total_); }

private:
    float32x4_t total_ = vdupq_n_f32(0);
};
#else
class RowSum {
public:
    void add(const uint8_t* block, const int8_t* codes, float scale, float) {
        int32_t products = 0;
        for (int i = 0; i < kStep; i++) products += static_cast<int8_t>(block[2 + i]) * codes[i];
        total_ += static_cast<float>(products) * (row_scale(block) * scale);
    }
    float result() const { return total_; }

private:
    float total_ = 0;
};
#endif

// One token: the results of n groups of rows, which begin at `rows`.
inline void matvec_rows(const uint8_t* rows, int64_t row_bytes, int n, const Rows& x, int64_t n_columns, f32v* y) {
    for (int64_t row = 0; row < int64_t{n} * kGroup; row += kRowsAtOnce) {
        const uint8_t* block = rows + row * row_bytes;
        RowSum sums[kRowsAtOnce];
        for (int64_t b = 0; b < n_columns / kStep; b++, block += kRowBlockBytes)
#pragma GCC unroll 4
            for (int r = 0; r < kRowsAtOnce; r++) sums[r].add(block + r * row_bytes, x.codes + b * kStep, x.scales[b], x.sums[b]);
        float results[kRowsAtOnce];
        for (int r = 0; r < kRowsAtOnce; r++) results[r] = sums[r].result();
        std::memcpy(reinterpret_cast<float*>(y + row / kGroup) + row % kGroup, results, sizeof results);
    }
}

// Decodes columns first … first + n of a group of rows into a panel, as for all other formats.
inline void decode_row_codes(const uint8_t* group, int64_t row_bytes, int64_t first, int64_t n, CodePanel& panel) {
    constexpr uint8_t kOffset = kCutsFull ? 128 : kFullOffset;  // cut codes are unsigned
    const uint8_t* block = group + first / kStep * kRowBlockBytes;
    for (int64_t step = 0; step < n / kStep; step++, block += kRowBlockBytes) {
        u32v words[8];
        transpose_words<8>([&](int r) { return block + r * row_bytes + 2; }, words);
        CodePanel::Step& out = panel.steps[step];
        for (int j = 0; j < 8; j++) {
            const u8v code = as<u8v>(words[j]) ^ splat(kOffset);
            store(out.codes[j], kCutsFull ? code & splat(uint8_t{15}) : code);
            if (kCutsFull) store(panel.high[step][j], shift_right(code, 4) & splat(uint8_t{15}));
        }
        u16l halves;
        for (int r = 0; r < kGroup; r++) {
            uint16_t half;
            std::memcpy(&half, block + r * row_bytes, 2);
            halves[r] = half;
        }
        const f32v scale = halves_to_float(halves);
        store(out.scale[0], scale);
        store(out.minimum[0], scale * kOffset);
    }
}

inline void decode_row_floats(const uint8_t* group, int64_t row_bytes, int64_t first, int64_t n, FloatPanel& panel) {
    for (int r = 0; r < kGroup; r++) {
        const uint8_t* block = group + r * row_bytes + first / kStep * kRowBlockBytes;
        for (int64_t c = 0; c < n; c += kStep, block += kRowBlockBytes) {
            const float scale = row_scale(block);
            for (int i = 0; i < kStep; i++) panel.values[c + i][r] = scale * static_cast<int8_t>(block[2 + i]);
        }
    }
}

}  // namespace motley::MOTLEY_ISA
