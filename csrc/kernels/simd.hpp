// The few vector operations that kernels are written in, 512 bits wide on every machine.
//
// The types are the compiler's own vectors: with AVX-512 each is one register, with AVX2 two, otherwise four of
// SSE2 or NEON. Only what plain operators cannot say has a version for each instruction set. Everything here and in
// the kernels lives in a namespace of its own for each set (MOTLEY_ISA), as the same source is compiled for all.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace motley::MOTLEY_ISA {

using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using u16x32 = uint16_t __attribute__((vector_size(64)));
using u8x64 = uint8_t __attribute__((vector_size(64)));
using i8x64 = int8_t __attribute__((vector_size(64)));
using u16x16 = uint16_t __attribute__((vector_size(32)));
using u8x16 = uint8_t __attribute__((vector_size(16)));
using i8x16 = int8_t __attribute__((vector_size(16)));

constexpr int kLanes = 16;

// A vector from four pieces of 16 bytes, or two of 32. (By way of memory it would wait for the stores.)
inline u32x16 load_pieces(const void* a, const void* b, const void* c, const void* d) {
#if defined(__AVX512F__)
    const auto piece = [](const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); };
    __m512i v = _mm512_castsi128_si512(piece(a));
    v = _mm512_inserti32x4(v, piece(b), 1);
    v = _mm512_inserti32x4(v, piece(c), 2);
    return reinterpret_cast<u32x16>(_mm512_inserti32x4(v, piece(d), 3));
#else
    u32x16 v;
    const void* const pieces[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++) std::memcpy(reinterpret_cast<char*>(&v) + 16 * i, pieces[i], 16);
    return v;
#endif
}

inline u32x16 load_pieces(const void* a, const void* b) {
#if defined(__AVX512F__)
    const auto piece = [](const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); };
    return reinterpret_cast<u32x16>(_mm512_inserti64x4(_mm512_castsi256_si512(piece(a)), piece(b), 1));
#else
    u32x16 v;
    std::memcpy(&v, a, 32);
    std::memcpy(reinterpret_cast<char*>(&v) + 32, b, 32);
    return v;
#endif
}

// Fetches memory ahead of its use. Inlined by force: GCC takes a function of nothing but prefetches for one without
// any effect, and drops the call.
[[gnu::always_inline]] inline void fetch(const void* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i);
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

inline f32x16 splat(float x) { return x - f32x16{}; }
inline i32x16 splat(int32_t x) { return x - i32x16{}; }
inline u32x16 splat(uint32_t x) { return x - u32x16{}; }
inline u8x64 splat(uint8_t x) { return static_cast<uint8_t>(x) - u8x64{}; }

// Wider and narrower numbers; the compiler's own conversions between such sizes go value by value.
inline i32x16 widen(u8x16 v) {
#if defined(__AVX512F__)
    return reinterpret_cast<i32x16>(_mm512_cvtepu8_epi32(reinterpret_cast<__m128i>(v)));
#elif defined(__AVX2__)
    const __m128i all = reinterpret_cast<__m128i>(v);
    const __m256i both[2] = {_mm256_cvtepu8_epi32(all), _mm256_cvtepu8_epi32(_mm_srli_si128(all, 8))};
    return load<i32x16>(both);
#else
    return __builtin_convertvector(v, i32x16);
#endif
}

inline i32x16 widen(i8x16 v) {
#if defined(__AVX512F__)
    return reinterpret_cast<i32x16>(_mm512_cvtepi8_epi32(reinterpret_cast<__m128i>(v)));
#elif defined(__AVX2__)
    const __m128i all = reinterpret_cast<__m128i>(v);
    const __m256i both[2] = {_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_srli_si128(all, 8))};
    return load<i32x16>(both);
#else
    return __builtin_convertvector(v, i32x16);
#endif
}

inline u32x16 widen(u16x16 v) {
#if defined(__AVX512F__)
    return reinterpret_cast<u32x16>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(v)));
#else
    return __builtin_convertvector(v, u32x16);
#endif
}

inline u16x16 narrow(u32x16 v) {
#if defined(__AVX512F__)
    return reinterpret_cast<u16x16>(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(v)));
#else
    return __builtin_convertvector(v, u16x16);
#endif
}

inline i8x16 narrow(i32x16 v) {
#if defined(__AVX512F__)
    return reinterpret_cast<i8x16>(_mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(v)));
#else
    return __builtin_convertvector(v, i8x16);
#endif
}

inline f32x16 to_float(i32x16 v) { return __builtin_convertvector(v, f32x16); }
inline f32x16 to_float(u32x16 v) { return to_float(reinterpret_cast<i32x16>(v)); }  // for values below 2^31

inline f32x16 vmax(f32x16 a, f32x16 b) { return a > b ? a : b; }
inline f32x16 vmin(f32x16 a, f32x16 b) { return a < b ? a : b; }
inline f32x16 vabs(f32x16 v) {
    return reinterpret_cast<f32x16>(reinterpret_cast<u32x16>(v) & splat(uint32_t{0x7fffffff}));
}

// Bytes shifted right by n < 8; what comes in from the neighbouring byte is for the caller to mask off.
inline u8x64 shift_right(u8x64 v, int n) { return reinterpret_cast<u8x64>(reinterpret_cast<u16x32>(v) >> n); }
inline u8x64 shift_left(u8x64 v, int n) { return reinterpret_cast<u8x64>(reinterpret_cast<u16x32>(v) << n); }

// Byte `i` of each lane, as a number.
inline u32x16 byte_of(u32x16 v, int i) { return (v >> (8 * i)) & splat(uint32_t{0xff}); }

// acc[lane] += Σ over the lane's four bytes of unsigned w · signed x.
inline i32x16 dot4(i32x16 acc, u8x64 w, i32x16 x) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<i32x16>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(acc), reinterpret_cast<__m512i>(w),
                                                        reinterpret_cast<__m512i>(x)));
#elif defined(__AVX2__)
    // Even and odd bytes as 16-bit numbers: exact, where the 8-bit multiply of AVX2 would saturate.
    struct Halves { __m256i part[2]; } a, b, c;
    std::memcpy(&a, &acc, 64);
    std::memcpy(&b, &w, 64);
    std::memcpy(&c, &x, 64);
    const __m256i low = _mm256_set1_epi16(0xff);
    for (int i = 0; i < 2; i++) {
        const __m256i even = _mm256_madd_epi16(_mm256_and_si256(b.part[i], low),
                                               _mm256_srai_epi16(_mm256_slli_epi16(c.part[i], 8), 8));
        const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(b.part[i], 8), _mm256_srai_epi16(c.part[i], 8));
        a.part[i] = _mm256_add_epi32(a.part[i], _mm256_add_epi32(even, odd));
    }
    std::memcpy(&acc, &a, 64);
    return acc;
#else
    const u32x16 codes = reinterpret_cast<u32x16>(w);
    for (int i = 0; i < 4; i++)
        acc += reinterpret_cast<i32x16>(byte_of(codes, i)) * ((x << (24 - 8 * i)) >> 24);
    return acc;
#endif
}

// Four consecutive bytes in every lane.
inline i32x16 splat4(const int8_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return splat(x);
}

// table[code] for codes below 16.
inline u8x64 look_up(u8x16 table, u8x64 codes) {
#if defined(__AVX512BW__)
    return reinterpret_cast<u8x64>(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(reinterpret_cast<__m128i>(table)),
                                                       reinterpret_cast<__m512i>(codes)));
#elif defined(__AVX2__)
    const __m256i both = _mm256_broadcastsi128_si256(reinterpret_cast<__m128i>(table));
    __m256i part[2];
    std::memcpy(part, &codes, 64);
    for (auto& p : part) p = _mm256_shuffle_epi8(both, p);
    std::memcpy(&codes, part, 64);
    return codes;
#else
    for (int i = 0; i < 64; i++) codes[i] = table[codes[i] & 15];
    return codes;
#endif
}

inline u8x16 look_up(u8x16 table, u8x16 codes) {
#if defined(__AVX2__)
    return reinterpret_cast<u8x16>(_mm_shuffle_epi8(reinterpret_cast<__m128i>(table), reinterpret_cast<__m128i>(codes)));
#else
    for (int i = 0; i < 16; i++) codes[i] = table[codes[i] & 15];
    return codes;
#endif
}

inline float half_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
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

inline f32x16 halves_to_float(u16x16 h) {
#if defined(__AVX512F__)
    return reinterpret_cast<f32x16>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(h)));
#elif defined(__AVX2__)
    __m128i half[2];
    std::memcpy(half, &h, 32);
    const __m256 both[2] = {_mm256_cvtph_ps(half[0]), _mm256_cvtph_ps(half[1])};
    return load<f32x16>(both);
#else
    f32x16 v;
    for (int i = 0; i < kLanes; i++) v[i] = half_to_float(h[i]);
    return v;
#endif
}

// The low 16 bits of each lane, a float16.
inline f32x16 low_half_to_float(u32x16 v) { return halves_to_float(narrow(v)); }

inline f32x16 bf16_to_float(u16x16 v) {
    return reinterpret_cast<f32x16>(widen(v) << 16);
}

inline uint16_t float_to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline f32x16 bytes_to_float(u8x16 v) { return to_float(widen(v)); }
inline f32x16 bytes_to_float(i8x16 v) { return to_float(widen(v)); }

inline float sum_lanes(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(reinterpret_cast<__m512>(v));
#else
    float total = 0;
    for (int i = 0; i < 8; i++) v[i] += v[i + 8];
    for (int i = 0; i < 4; i++) v[i] += v[i + 4];
    for (int i = 0; i < 4; i++) total += v[i];
    return total;
#endif
}

inline float max_lanes(f32x16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(reinterpret_cast<__m512>(v));
#else
    float most = v[0];
    for (int i = 1; i < kLanes; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

inline i32x16 lane_numbers() { return i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// The first n values, zeros behind them; and the way back.
inline f32x16 load_some(const float* p, int n) {
    f32x16 v = {};
    std::memcpy(&v, p, n * sizeof(float));
    return v;
}
inline void store_some(float* p, f32x16 v, int n) { std::memcpy(p, &v, n * sizeof(float)); }

// Ties to even, for |v| < 2^22.
inline f32x16 round_even(f32x16 v) { return (v + 12582912.0f) - 12582912.0f; }

// e^x to within 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN stays.
inline f32x16 vexp(f32x16 x) {
    const f32x16 lowest = splat(-87.3f), highest = splat(88.7f);
    const f32x16 clamped = x < lowest ? lowest : (x > highest ? highest : x);
    const f32x16 n = round_even(clamped * 1.44269504f);
    const f32x16 r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    f32x16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const f32x16 whole = n == n ? n : f32x16{};
    const i32x16 power = __builtin_convertvector(whole, i32x16);
    const i32x16 half = power >> 1;  // two factors: 2^128 is no float
    const f32x16 y = p * reinterpret_cast<f32x16>((half + 127) << 23) *
                     reinterpret_cast<f32x16>((power - half + 127) << 23);
    const f32x16 limited = x > highest ? splat(INFINITY) : y;
    return x < lowest ? f32x16{} : limited;
}

}  // namespace motley::MOTLEY_ISA
