// The vector operations that all kernels use. A vector is as wide as a register of the instruction set:
// kLanes numbers of 32 bits, so 16 with AVX-512, 8 with AVX2 and 4 elsewhere (SSE2, NEON).
//
// The types are the compiler's own vectors. Only operations that plain operators cannot express have a version for
// each instruction set. All code here and in the kernels is in a separate namespace for each set (MOTLEY_ISA), because
// the same source is compiled for all sets. Products of bytes, which differ most between the sets, are in dot.hpp.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include "simd_neon.hpp"
#endif

#if defined(MOTLEY_VECTOR_BYTES)  // given by the build: narrower than the instruction set allows
#elif defined(__AVX512F__)
#define MOTLEY_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define MOTLEY_VECTOR_BYTES 32
#else
#define MOTLEY_VECTOR_BYTES 16
#endif

namespace motley::MOTLEY_ISA {

constexpr int kVectorBytes = MOTLEY_VECTOR_BYTES;
constexpr int kLanes = kVectorBytes / 4;

// Whole vectors.
using f32v = float __attribute__((vector_size(kVectorBytes)));
using i32v = int32_t __attribute__((vector_size(kVectorBytes)));
using u32v = uint32_t __attribute__((vector_size(kVectorBytes)));
using i16v = int16_t __attribute__((vector_size(kVectorBytes)));
using u16v = uint16_t __attribute__((vector_size(kVectorBytes)));
using u8v = uint8_t __attribute__((vector_size(kVectorBytes)));
using i8v = int8_t __attribute__((vector_size(kVectorBytes)));
// One narrow number for each lane.
using u16l = uint16_t __attribute__((vector_size(kVectorBytes / 2)));
using u8l = uint8_t __attribute__((vector_size(kVectorBytes / 4)));
using i8l = int8_t __attribute__((vector_size(kVectorBytes / 4)));
// 16 bytes, whatever the width.
using u8x16 = uint8_t __attribute__((vector_size(16)));

// Vectors as the arguments of intrinsics: same bits, another type.
template <class To, class From>
inline To as(From v) {
    static_assert(sizeof(To) == sizeof(From));
    return reinterpret_cast<To>(v);
}

// Prefetches memory into the first-level cache, only into the second, or for a single use (non-temporal: other levels do
// not keep it). Always inlined: GCC treats a function that only prefetches as one without effects, and removes the call.
constexpr int kOnce = 0;
template <int Level = 1>
[[gnu::always_inline]] inline void fetch(const void* p, int64_t bytes) {
    constexpr int kLocality = Level == kOnce ? 0 : Level == 1 ? 3 : 2;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i, 0, kLocality);
}

template <class V>
inline V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class V>
inline void store(void* p, V v) {
    std::memcpy(p, &v, sizeof v);
}

// Forces a vector to be computed or loaded at this point, once. Otherwise GCC loads what is used several times for each of its
// uses, and computes all products of a step before their sum, for which there are too few registers.
template <class V>
[[gnu::always_inline]] inline void keep_in_register(V& v) {
#if defined(__x86_64__)
    asm("" : "+v"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#endif
}

inline f32v splat(float x) { return x - f32v{}; }
inline i32v splat(int32_t x) { return x - i32v{}; }
inline u32v splat(uint32_t x) { return x - u32v{}; }
inline u8v splat(uint8_t x) { return static_cast<uint8_t>(x) - u8v{}; }

// The bytes of a lane at the low end of a 128-bit register.
#if MOTLEY_VECTOR_BYTES == 32
template <class V>
inline __m128i low_bytes(V v) {
    int64_t bits;
    std::memcpy(&bits, &v, 8);
    return _mm_cvtsi64_si128(bits);
}
#endif

// Conversions to wider and narrower numbers; the compiler's own conversions are scalar.
inline i32v widen(u8l v) {
#if MOTLEY_VECTOR_BYTES == 64
    return as<i32v>(_mm512_cvtepu8_epi32(as<__m128i>(v)));
#elif MOTLEY_VECTOR_BYTES == 32
    return as<i32v>(_mm256_cvtepu8_epi32(low_bytes(v)));
#elif defined(__aarch64__)
    return as<i32v>(neon::widen_unsigned(v));
#else
    return __builtin_convertvector(v, i32v);
#endif
}

inline i32v widen(i8l v) {
#if MOTLEY_VECTOR_BYTES == 64
    return as<i32v>(_mm512_cvtepi8_epi32(as<__m128i>(v)));
#elif MOTLEY_VECTOR_BYTES == 32
    return as<i32v>(_mm256_cvtepi8_epi32(low_bytes(v)));
#elif defined(__aarch64__)
    return as<i32v>(neon::widen_signed(v));
#else
    return __builtin_convertvector(v, i32v);
#endif
}

inline u32v widen(u16l v) {
#if MOTLEY_VECTOR_BYTES == 64
    return as<u32v>(_mm512_cvtepu16_epi32(as<__m256i>(v)));
#elif MOTLEY_VECTOR_BYTES == 32
    return as<u32v>(_mm256_cvtepu16_epi32(as<__m128i>(v)));
#else
    return __builtin_convertvector(v, u32v);
#endif
}

// The low bits of each lane; with 8 bits, only of numbers that fit.
inline u16l narrow(u32v v) {
#if MOTLEY_VECTOR_BYTES == 64
    return as<u16l>(_mm512_cvtepi32_epi16(as<__m512i>(v)));
#elif MOTLEY_VECTOR_BYTES == 32
    const __m256i low = _mm256_and_si256(as<__m256i>(v), _mm256_set1_epi32(0xffff));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    return as<u16l>(_mm256_castsi256_si128(packed));
#else
    return __builtin_convertvector(v, u16l);
#endif
}

inline i8l narrow(i32v v) {
#if MOTLEY_VECTOR_BYTES == 64
    return as<i8l>(_mm512_cvtepi32_epi8(as<__m512i>(v)));
#elif MOTLEY_VECTOR_BYTES == 32
    const __m256i pairs = _mm256_packs_epi32(as<__m256i>(v), as<__m256i>(v));
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(pairs, pairs), _mm256_setr_epi32(0, 4, 0, 0, 0, 0, 0, 0));
    i8l narrowed;
    const int64_t bits = _mm256_extract_epi64(bytes, 0);
    std::memcpy(&narrowed, &bits, 8);
    return narrowed;
#elif defined(__aarch64__)
    const uint32_t bits = neon::narrow_to_bytes(as<int32x4_t>(v));
    i8l narrowed;
    std::memcpy(&narrowed, &bits, 4);
    return narrowed;
#else
    return __builtin_convertvector(v, i8l);
#endif
}

inline f32v to_float(i32v v) { return __builtin_convertvector(v, f32v); }
inline f32v to_float(u32v v) { return to_float(as<i32v>(v)); }  // for values below 2^31

inline f32v vmax(f32v a, f32v b) { return a > b ? a : b; }
inline f32v vmin(f32v a, f32v b) { return a < b ? a : b; }
inline f32v vabs(f32v v) {
    return as<f32v>(as<u32v>(v) & splat(uint32_t{0x7fffffff}));
}

// Bytes shifted right by n < 8; the caller masks off the bits from the neighbouring byte.
inline u8v shift_right(u8v v, int n) { return as<u8v>(as<u16v>(v) >> n); }
inline u8v shift_left(u8v v, int n) { return as<u8v>(as<u16v>(v) << n); }

// Byte `i` of each lane, as a number.
inline u32v byte_of(u32v v, int i) { return (v >> (8 * i)) & splat(uint32_t{0xff}); }

// table[code] for codes below 16.
inline u8v look_up(u8x16 table, u8v codes) {
#if MOTLEY_VECTOR_BYTES == 64
    return as<u8v>(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(as<__m128i>(table)), as<__m512i>(codes)));
#elif MOTLEY_VECTOR_BYTES == 32
    return as<u8v>(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(as<__m128i>(table)), as<__m256i>(codes)));
#elif defined(__aarch64__)
    return as<u8v>(neon::look_up(as<uint8x16_t>(table), as<uint8x16_t>(codes)));
#else
    for (int i = 0; i < kVectorBytes; i++) codes[i] = table[codes[i] & 15];
    return codes;
#endif
}

#if MOTLEY_VECTOR_BYTES != 16
inline u8x16 look_up(u8x16 table, u8x16 codes) {
    return as<u8x16>(_mm_shuffle_epi8(as<__m128i>(table), as<__m128i>(codes)));
}
#endif

inline float half_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#elif defined(__aarch64__)
    return neon::half_to_float(h);
#else
    const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
    float magnitude;
    if (exponent == 0) {
        magnitude = float(fraction) * 0x1p-24f;
    } else {
        const uint32_t bits = ((exponent == 31 ? 255 : exponent + 112) << 23) | (fraction << 13);
        std::memcpy(&magnitude, &bits, 4);
    }
    uint32_t bits;
    std::memcpy(&bits, &magnitude, 4);
    bits |= sign;
    std::memcpy(&magnitude, &bits, 4);
    return magnitude;
#endif
}

// Rounds to nearest, ties to even.
inline uint16_t float_to_half(float x) {
#if defined(__F16C__)
    return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    return neon::float_to_half(x);
#else
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x47800000) return sign | 0x7c00;
    if (bits < 0x38800000) {  // subnormal: the sum rounds to a multiple of 2^-24
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        std::memcpy(&bits, &magnitude, 4);
        return sign | static_cast<uint16_t>(bits - 0x3f000000);
    }
    bits += 0xfff + ((bits >> 13) & 1);
    return sign | static_cast<uint16_t>((bits - 0x38000000) >> 13);
#endif
}

inline f32v halves_to_float(u16l h) {
#if MOTLEY_VECTOR_BYTES == 64
    return as<f32v>(_mm512_cvtph_ps(as<__m256i>(h)));
#elif MOTLEY_VECTOR_BYTES == 32
    return as<f32v>(_mm256_cvtph_ps(as<__m128i>(h)));
#elif defined(__aarch64__)
    return as<f32v>(neon::halves_to_float(as<uint16x4_t>(h)));
#else
    f32v v;
    for (int i = 0; i < kLanes; i++) v[i] = half_to_float(h[i]);
    return v;
#endif
}

// The low 16 bits of each lane, a float16.
inline f32v low_half_to_float(u32v v) { return halves_to_float(narrow(v)); }

// Rounds to nearest, ties to even.
inline u16l floats_to_half(f32v v) {
#if MOTLEY_VECTOR_BYTES == 64
    return as<u16l>(_mm512_cvtps_ph(as<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#elif MOTLEY_VECTOR_BYTES == 32
    return as<u16l>(_mm256_cvtps_ph(as<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
#else
    u16l h;
    for (int i = 0; i < kLanes; i++) h[i] = float_to_half(v[i]);
    return h;
#endif
}

// Lanes in other places: those of pairs exchanged; the first ones of pairs twice; the second ones twice.
inline f32v swap_pairs(f32v v) {
    i32v from;
    for (int i = 0; i < kLanes; i++) from[i] = i ^ 1;
    return __builtin_shuffle(v, from);
}
inline f32v double_firsts(f32v v) {
    i32v from;
    for (int i = 0; i < kLanes; i++) from[i] = i & ~1;
    return __builtin_shuffle(v, from);
}
inline f32v double_seconds(f32v v) {
    i32v from;
    for (int i = 0; i < kLanes; i++) from[i] = i | 1;
    return __builtin_shuffle(v, from);
}

// The first ones of all pairs in two vectors; and the second ones.
inline f32v firsts(f32v a, f32v b) {
    i32v from;
    for (int i = 0; i < kLanes; i++) from[i] = 2 * i;
    return __builtin_shuffle(a, b, from);
}
inline f32v seconds(f32v a, f32v b) {
    i32v from;
    for (int i = 0; i < kLanes; i++) from[i] = 2 * i + 1;
    return __builtin_shuffle(a, b, from);
}

inline f32v bf16_to_float(u16l v) {
    return as<f32v>(widen(v) << 16);
}

inline uint16_t float_to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline f32v bytes_to_float(u8l v) { return to_float(widen(v)); }
inline f32v bytes_to_float(i8l v) { return to_float(widen(v)); }

inline float sum_lanes(f32v v) {
#if MOTLEY_VECTOR_BYTES == 64
    return _mm512_reduce_add_ps(as<__m512>(v));
#elif MOTLEY_VECTOR_BYTES == 32
    const __m256 all = as<__m256>(v);
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
#else
    return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

inline float max_lanes(f32v v) {
#if MOTLEY_VECTOR_BYTES == 64
    return _mm512_reduce_max_ps(as<__m512>(v));
#elif MOTLEY_VECTOR_BYTES == 32
    const __m256 all = as<__m256>(v);
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
#else
    float most = v[0];
    for (int i = 1; i < kLanes; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

inline int32_t max_lanes(i32v v) {
#if MOTLEY_VECTOR_BYTES == 64
    return _mm512_reduce_max_epi32(as<__m512i>(v));
#elif MOTLEY_VECTOR_BYTES == 32
    const __m256i all = as<__m256i>(v);
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
#else
    int32_t most = v[0];
    for (int i = 1; i < kLanes; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

inline int32_t sum_lanes(i8l v) {
#if MOTLEY_VECTOR_BYTES == 64
    const __m128i halves = _mm_sad_epu8(_mm_xor_si128(as<__m128i>(v), _mm_set1_epi8(-128)), _mm_setzero_si128());  // plus 128: unsigned
    return _mm_cvtsi128_si32(_mm_add_epi32(halves, _mm_shuffle_epi32(halves, 0x4e))) - 128 * kLanes;
#elif MOTLEY_VECTOR_BYTES == 32
    return _mm_cvtsi128_si32(_mm_sad_epu8(_mm_xor_si128(low_bytes(v), _mm_set1_epi8(-128)), _mm_setzero_si128())) - 128 * kLanes;
#else
    int32_t sum = 0;
    for (int i = 0; i < kLanes; i++) sum += v[i];
    return sum;
#endif
}

inline i32v lane_numbers() {
    i32v numbers;
    for (int i = 0; i < kLanes; i++) numbers[i] = i;
    return numbers;
}

// Load the first n values, with zeros after them; and store them. Mostly n is kLanes: a copy of another size is a call.
inline f32v load_some(const float* p, int n) {
    if (n == kLanes) [[likely]] return load<f32v>(p);
    f32v v = {};
    std::memcpy(&v, p, n * sizeof(float));
    return v;
}
inline void store_some(float* p, f32v v, int n) {
    if (n == kLanes) [[likely]] return store(p, v);
    std::memcpy(p, &v, n * sizeof(float));
}

// Ties to even, for |v| < 2^22.
inline f32v round_even(f32v v) { return (v + 12582912.0f) - 12582912.0f; }

// e^r for |r| <= ln(2) / 2.
inline f32v exp_of_remainder(f32v r) {
    f32v p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * (r * r) + r + 1.0f;
}

// e^x to within 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN stays.
inline f32v vexp(f32v x) {
    const f32v lowest = splat(-87.3f), highest = splat(88.7f);
    const f32v clamped = x < lowest ? lowest : (x > highest ? highest : x);
    const f32v n = round_even(clamped * 1.44269504f);
    const f32v p = exp_of_remainder((clamped - n * 0.693359375f) + n * 2.12194440e-4f);
    const f32v whole = n == n ? n : f32v{};
    const i32v power = __builtin_convertvector(whole, i32v);
    const i32v half = power >> 1;  // two factors: 2^128 is no float
    const f32v y = p * as<f32v>((half + 127) << 23) *
                     as<f32v>((power - half + 127) << 23);
    const f32v limited = x > highest ? splat(INFINITY) : y;
    return x < lowest ? f32v{} : limited;
}

// The same for x <= 0, which needs no second factor and no upper limit.
inline f32v vexp_below_zero(f32v x) {
    const f32v shifted = x * 1.44269504f + 12582912.0f;  // as in round_even: the nearest whole number is in the lowest bits
    const f32v n = shifted - 12582912.0f;
    const f32v power = as<f32v>((as<u32v>(shifted) << 23) + (127u << 23));  // 2^n
    const f32v y = exp_of_remainder((x - n * 0.693359375f) + n * 2.12194440e-4f) * power;
    return x < splat(-87.3f) ? f32v{} : y;
}

}  // namespace motley::MOTLEY_ISA
