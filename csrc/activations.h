// σ(z) and σ'(z) of every activation, and the one list of them.
//
// Written once for every processor. M is the arithmetic: its Scalar, where_less, clamp, exp, tanh
// and the normal distribution; V is what it computes with, vectors or a scalar. Where a caller
// drops the slope, the compiler drops its computation. A NaN stays a NaN.

#pragma once

#include "inline.h"

namespace resode {

struct Relu {
  template <class M, class V>
  static RESODE_INLINE void apply(V z, V& value, V& slope) {
    using T = typename M::Scalar;
    value = M::where_less(z, T(0), z * T(0), z);
    slope = M::where_less(-z, T(0), z * T(0) + T(1), z * T(0));
  }
};

struct Tanh {
  template <class M, class V>
  static RESODE_INLINE void apply(V z, V& value, V& slope) {
    using T = typename M::Scalar;
    value = M::tanh(z);
    slope = T(1) - value * value;
  }
};

// gelu(z) = z Φ(z), gelu'(z) = Φ(z) + z φ(z), with the normal distribution's Φ and its density φ.
struct Gelu {
  template <class M, class V>
  static RESODE_INLINE void apply(V z, V& value, V& slope) {
    V cdf, pdf;
    M::normal(z, cdf, pdf);
    value = z * cdf;
    slope = cdf + z * pdf;
  }
};

// silu(z) = z s, silu'(z) = s + z s (1 − s), with s = 1/(1 + e), e = exp(−z); 1 − s = e s does not
// cancel.
struct Silu {
  template <class M, class V>
  static RESODE_INLINE void apply(V z, V& value, V& slope) {
    using T = typename M::Scalar;
    const V e = M::exp(M::clamp(-z, M::exp_limit));
    const V s = T(1) / (T(1) + e);
    value = z * s;
    slope = s + value * (e * s);
  }
};

// The list: X(name, struct) of each. From it come the enum (stage.h), the names in Python
// (bindings.h) and the choice at run time, on CPUs and GPUs. So an activation is added by a struct
// above and a line here. A name is that of functional.ACTIVATIONS.
#define RESODE_ACTIVATIONS(X) \
  X(relu, Relu)               \
  X(tanh, Tanh)               \
  X(gelu, Gelu)               \
  X(silu, Silu)

}  // namespace resode
