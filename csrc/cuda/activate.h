// Activations on a GPU: the arithmetic that activations.h is given, float32 and one number at a
// time, and the choice of an activation at run time.

#pragma once

#include <cuda_runtime.h>

#include "../stage.h"

namespace resode {

struct Math {
  using Scalar = float;
  static constexpr float exp_limit = 87.3f;  // e^±limit is a normal number

  // a where x < y, else b
  static __device__ __forceinline__ float where_less(float x, float y, float a, float b) {
    return x < y ? a : b;
  }
  // x where it is not beyond ±limit; a NaN stays one
  static __device__ __forceinline__ float clamp(float x, float limit) {
    return x < -limit ? -limit : (x > limit ? limit : x);
  }
  static __device__ __forceinline__ float exp(float x) { return expf(x); }
  static __device__ __forceinline__ float tanh(float x) { return tanhf(x); }
  // Φ(z) = erfc(−z/√2)/2, which does not cancel for negative z.
  static __device__ __forceinline__ void normal(float z, float& cdf, float& pdf) {
    cdf = 0.5f * erfcf(-0.70710678118654752f * z);
    pdf = 0.39894228040143268f * expf(-0.5f * z * z);
  }
};

// f(z) = z, of blocks without an activation.
struct Identity {
  template <class M, class V>
  static __device__ __forceinline__ void apply(V z, V& value, V& slope) {
    value = z, slope = 1;
  }
};

// σ and σ' of V numbers. Every thread of a launch has the same activation, and the numbers share
// the decision.
template <class F, int V>
__device__ __forceinline__ void activate_by(const float (&z)[V], float (&value)[V],
                                            float (&slope)[V]) {
#pragma unroll
  for (int k = 0; k < V; ++k) F::template apply<Math>(z[k], value[k], slope[k]);
}

template <int V>
__device__ __forceinline__ void activate(Activation activation, const float (&z)[V],
                                         float (&value)[V], float (&slope)[V]) {
  switch (activation) {
#define RESODE_CASE(name, Struct) \
  case Activation::name:          \
    return activate_by<Struct>(z, value, slope);
    RESODE_ACTIVATIONS(RESODE_CASE)
#undef RESODE_CASE
    case Activation::identity:
      break;
  }
  activate_by<Identity>(z, value, slope);
}

}  // namespace resode
