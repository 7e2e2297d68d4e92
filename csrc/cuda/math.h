// The arithmetic that activations.h is given on a GPU: float32, one number at a time.

#pragma once

#include <cuda_runtime.h>

#include "../inline.h"
#include "../stage.h"

namespace resode {

// a where x < y, else b
__device__ __forceinline__ float where_less(float x, float y, float a, float b) {
  return x < y ? a : b;
}

// x where it is not beyond ±limit; a NaN stays one
__device__ __forceinline__ float clamp(float x, float limit) {
  return x < -limit ? -limit : (x > limit ? limit : x);
}

struct Math {
  using Scalar = float;
  static constexpr float exp_limit = 87.3f;  // e^±limit is a normal number
  static constexpr float tanh_limit = 9.1f;  // tanh rounds to 1 beyond it

  static __device__ __forceinline__ float exp(float x) { return expf(x); }
  static __device__ __forceinline__ float expm1(float x) { return expm1f(x); }
  // Φ(z) = erfc(−z/√2)/2, which does not cancel for negative z.
  static __device__ __forceinline__ void normal(float z, float& cdf, float& pdf) {
    cdf = 0.5f * erfcf(-0.70710678118654752f * z);
    pdf = 0.39894228040143268f * expf(-0.5f * z * z);
  }
};

}  // namespace resode

#include "../activations.h"

namespace resode {

// σ(z) and σ'(z); every thread of a launch has the same activation.
__device__ __forceinline__ void activate(Activation activation, float z, float& value,
                                         float& slope) {
  switch (activation) {
    case Activation::identity:
      value = z, slope = 1;
      break;
    case Activation::relu:
      Relu::apply<Math>(z, value, slope);
      break;
    case Activation::tanh:
      Tanh::apply<Math>(z, value, slope);
      break;
    case Activation::gelu:
      Gelu::apply<Math>(z, value, slope);
      break;
    case Activation::silu:
      Silu::apply<Math>(z, value, slope);
      break;
  }
}

}  // namespace resode
