// Stands in for CUDA's header. Half precision rounds to nearest, ties to even.

#pragma once

#include <bit>
#include <cstdint>

#include "cuda_runtime.h"

namespace emulation {

inline float half_to_float(uint16_t half) {
  uint32_t sign = uint32_t(half & 0x8000) << 16;
  uint32_t magnitude = uint32_t(half & 0x7fff) << 13;
  // Exact, for subnormal numbers too.
  uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  return std::bit_cast<float>(sign | ((half & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : finite));
}

inline uint16_t float_to_half(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  uint16_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return 0x7fff;          // NaN
  if (bits >= 0x477ff000) return sign | 0x7c00;  // 65520 and more round to infinity
  if (bits < 0x38800000)                         // subnormal: adding 1/2 rounds
    return sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + 0.5f) - 0x3f000000);
  return sign | ((bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13);
}

}  // namespace emulation

struct __half {
  uint16_t bits;
};
struct __align__(4) __half2 {
  __half x, y;
};

inline __half __float2half_rn(float x) { return {emulation::float_to_half(x)}; }
inline __half __float2half(float x) { return __float2half_rn(x); }
inline float __half2float(__half x) { return emulation::half_to_float(x.bits); }
inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
