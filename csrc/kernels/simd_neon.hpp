// ARM versions, in NEON of ARMv8.0, of the operations that simd.hpp cannot express in plain operators: 16-byte vectors.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace motley::MOTLEY_ISA::neon {

// Four bytes at the low end of a register.
template <class V>
inline uint8x8_t low_bytes(V v) {
    static_assert(sizeof v == 4);
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    return vcreate_u8(bits);
}

template <class V>
inline uint32x4_t widen_unsigned(V v) { return vmovl_u16(vget_low_u16(vmovl_u8(low_bytes(v)))); }

template <class V>
inline int32x4_t widen_signed(V v) { return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(low_bytes(v))))); }

// The low byte of each lane.
inline uint32_t narrow_to_bytes(int32x4_t v) {
    const int16x4_t halves = vmovn_s32(v);
    return vget_lane_u32(vreinterpret_u32_s8(vmovn_s16(vcombine_s16(halves, halves))), 0);
}

inline uint8x16_t look_up(uint8x16_t table, uint8x16_t codes) { return vqtbl1q_u8(table, codes); }

inline float32x4_t halves_to_float(uint16x4_t h) { return vcvt_f32_f16(vreinterpret_f16_u16(h)); }

inline float half_to_float(uint16_t h) { return vgetq_lane_f32(halves_to_float(vdup_n_u16(h)), 0); }

// Rounds to nearest, ties to even.
inline uint16_t float_to_half(float x) { return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0); }

}  // namespace motley::MOTLEY_ISA::neon
