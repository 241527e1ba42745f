// SPDX-License-Identifier: Apache-2.0
// bf16, e4m3 and scales, with the same bits on the GPU and on the CPU.
#pragma once

#include <cmath>
#include <cstring>

#include "marrow/device/platform.cuh"

namespace marrow::ep {
#if defined(__CUDACC__)
inline namespace gpu_device {
#else
inline namespace cpu_device {
#endif

MARROW_DEVICE float float_of(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
#endif
}
MARROW_DEVICE std::uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
#endif
}

/// The two bf16 of a word.
MARROW_DEVICE float bf16_low(std::uint32_t word) { return float_of(word << 16); }
MARROW_DEVICE float bf16_high(std::uint32_t word) { return float_of(word & 0xffff0000u); }

/// Nearest even; NaN becomes 0x7fff.
MARROW_DEVICE std::uint32_t to_bf16(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
MARROW_DEVICE std::uint32_t to_bf16_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  std::uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return to_bf16(low) | to_bf16(high) << 16;
#endif
}

/// Nearest even, finite values saturated to 448, NaN and infinity 0x7f.
MARROW_DEVICE std::uint32_t to_e4m3(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = bits >> 24 & 0x80;
  const std::uint32_t size = bits & 0x7fffffffu;
  if (size >= 0x7f800000u) return 0x7f;         // NaN, infinity
  if (size >= 0x43e00000u) return sign | 0x7e;  // 448 and more
  if (size <
      0x3c800000u) {  // below 2^-6: multiples of 2^-9, by adding a number whose last bit is that
    const float shifted = float_of(size) + 16384.0f;  // 2^14: one unit in the last place is 2^-9
    return sign | (bits_of(shifted) - bits_of(16384.0f));
  }
  const std::uint32_t rounded = size + 0x7ffff + (size >> 20 & 1);
  const std::uint32_t code = (rounded >> 20) - ((127 - 7) << 3);
  return sign | (code > 0x7e ? 0x7e : code);
}
/// Four of them in a word, the first lowest. (An infinity comes only with an infinite amax, whose factor is 0.)
MARROW_DEVICE std::uint32_t to_e4m3_word(float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  std::uint32_t word;
  asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; "
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high};}"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
#else
  return to_e4m3(a) | to_e4m3(b) << 8 | to_e4m3(c) << 16 | to_e4m3(d) << 24;
#endif
}

/// The larger of two sizes (bits of floats without sign); NaN counts as nothing.
MARROW_DEVICE std::uint32_t larger_size(std::uint32_t a, std::uint32_t b) { return a > b ? a : b; }
MARROW_DEVICE std::uint32_t size_of_bf16(std::uint32_t half) {
  const std::uint32_t size = (half & 0x7fff) << 16;
  return size > 0x7f800000u ? 0 : size;
}

struct Quantiser {
  float factor;  ///< x * factor is converted
  float scale;   ///< what the receiver multiplies with
};
/// @param amax_size  bits of the group's largest |x|
MARROW_DEVICE Quantiser quantiser(std::uint32_t amax_size, bool power_of_two) {
  float amax = float_of(amax_size);
  if (amax < 1e-4f) amax = 1e-4f;
  const float scale = amax * (1.0f / 448.0f);
  if (!power_of_two) return {448.0f / amax, scale};
  const std::uint32_t bits = bits_of(scale);
  const std::uint32_t up =
      (bits >> 23) + ((bits & 0x7fffffu) != 0);  // exponent of the power, biased
  if (up >= 255) return {0.0f, float_of(0x7f800000u)};
  return {float_of((254 - up) << 23), float_of(up << 23)};
}

}  // namespace cpu_device / gpu_device
}  // namespace marrow::ep
