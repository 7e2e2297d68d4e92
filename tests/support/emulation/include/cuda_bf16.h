// Stands in for CUDA's header. bfloat16 rounds to nearest, ties to even.

#pragma once

#include <bit>
#include <cstdint>

#include "cuda_runtime.h"

namespace emulation {

inline float bfloat16_to_float(uint16_t x) { return std::bit_cast<float>(uint32_t(x) << 16); }

inline uint16_t float_to_bfloat16(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;  // NaN
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

}  // namespace emulation

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __align__(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {emulation::float_to_bfloat16(x)}; }
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return emulation::bfloat16_to_float(x.bits); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline float2 __bfloat1622float2(__nv_bfloat162 x) {
  return {__bfloat162float(x.x), __bfloat162float(x.y)};
}
