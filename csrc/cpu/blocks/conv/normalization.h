// Batch normalization in pieces that fuse with the convolutions around it.
//
// With mean μ and variance v of a channel over all pixels, r = 1/√(v + ε), scale a = γ r and shift
// b = β − a μ:
//
//     apply      y = a z + b
//     gradient   ∇β = Σ dy,  ∇γ = r Σ dy (z − μ),
//                dz = a (dy − k1 − (z − μ) k2),  k1 = Σ dy / count,  k2 = r² Σ dy (z − μ) / count
//
// where μ and v are constants, k1 = k2 = 0. Sums over a short run of pixels are formed in the
// stream's dtype, sums of runs in double; threads add up theirs in their order.

#pragma once

#include <cmath>

#include "../../core/arena.h"
#include "../../core/epilogues.h"

namespace {

// Everything that one layer's normalization needs, per channel (padded); all but γ and β belong to
// one evaluation.
template <class T>
struct Normalization {
  const T *gamma, *beta;
  T *mean, *root, *scale, *shift;  // μ, r, a, b
  T *k1, *k2;

  static Normalization lay_out(Arena& arena, int64_t channels) {
    Normalization bn{};
    for (T** vector : {&bn.mean, &bn.root, &bn.scale, &bn.shift, &bn.k1, &bn.k2})
      *vector = arena.take<T>(padded<T>(channels));
    return bn;
  }

  void set(int64_t c, double mu, double variance, double epsilon) const {
    const double r = 1 / std::sqrt(variance + epsilon), a = double(gamma[c]) * r;
    mean[c] = T(mu);
    root[c] = T(r);
    scale[c] = T(a);
    shift[c] = T(double(beta[c]) - a * mu);
  }
};

// f(offset) for a run of pixels of one panel.
template <class T, class F>
RESODE_INLINE void for_each_pixel(int64_t offset, int64_t pixels, F f) {
  for (const int64_t end = offset + pixels * kPanel<T>; offset < end; offset += kPanel<T>)
    f(offset);
}

// f(first, count) for the runs of some pixels.
template <class F>
RESODE_INLINE void for_each_run(int64_t pixels, F f) {
  constexpr int64_t kRun = 64;
  for (int64_t q = 0; q < pixels; q += kRun) f(q, min(kRun, pixels - q));
}

// Mean and sum of squared deviations of what has been seen, per channel. Runs are merged by
// the formula of Chan, Golub and LeVeque (1979), which does not cancel.
struct Moments {
  double *mean, *deviation;

  static RESODE_INLINE void merge(double& mean, double& deviation, double count, double other_mean,
                                  double other_deviation, double other_count) {
    const double delta = other_mean - mean, share = other_count / (count + other_count);
    mean += delta * share;
    deviation += other_deviation + delta * delta * (count * share);
  }

  // The pixels that begin at z, in channels c … c + P; `seen` pixels came before them.
  template <class T>
  void add(int64_t c, const T* z, int64_t pixels, int64_t seen) const {
    for_each_run(pixels,
                 [&](int64_t q, int64_t count) { add_run(c, z + q * kPanel<T>, count, seen + q); });
  }

 private:
  template <class T>
  void add_run(int64_t c, const T* z, int64_t pixels, int64_t seen) const {
    using V = PanelRow<T>;
    constexpr int kChains = 4;  // so that latency is hidden
    V sums[kChains] = {};
    int64_t q = 0;
    for (; q + kChains <= pixels; q += kChains)
#pragma GCC unroll 4
      for (int k = 0; k < kChains; ++k) sums[k] = sums[k] + load_all<V>(z + (q + k) * kPanel<T>);
    for (; q < pixels; ++q) sums[0] = sums[0] + load_all<V>(z + q * kPanel<T>);
    const V middle = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * (T(1) / T(pixels));
    // The deviations from this rounded mean also give its error.
    V rest[2] = {}, squares[2] = {};
    const auto deviate = [&](int k, int64_t q) RESODE_ALWAYS {
      const V d = load_all<V>(z + q * kPanel<T>) - middle;
      rest[k] = rest[k] + d;
      squares[k] = squares[k] + d * d;
    };
    for (q = 0; q + 2 <= pixels; q += 2) deviate(0, q), deviate(1, q + 1);
    if (q < pixels) deviate(0, q);
    T means[kPanel<T>], rests[kPanel<T>], deviations[kPanel<T>];
    store_all(means, middle);
    store_all(rests, rest[0] + rest[1]);
    store_all(deviations, squares[0] + squares[1]);
    for (int i = 0; i < kPanel<T>; ++i) {
      const double off = double(rests[i]) / double(pixels);
      merge(mean[c + i], deviation[c + i], double(seen), means[i] + off,
            deviations[i] - off * rests[i], double(pixels));
    }
  }
};

// Σ dy and Σ dy (z − μ), per channel.
struct Products {
  double *plain, *centered;

  template <class T>
  void add(int64_t c, const T* dy, const T* z, const T* mean, int64_t pixels) const {
    for_each_run(pixels, [&](int64_t q, int64_t count) {
      add_run(c, dy + q * kPanel<T>, z + q * kPanel<T>, mean, count);
    });
  }

 private:
  template <class T>
  void add_run(int64_t c, const T* dy, const T* z, const T* mean, int64_t pixels) const {
    using V = PanelRow<T>;
    const V mu = load_all<V>(mean + c);
    V sums[2] = {}, products[2] = {};
    const auto multiply = [&](int k, int64_t q) RESODE_ALWAYS {
      const V g = load_all<V>(dy + q * kPanel<T>);
      sums[k] = sums[k] + g;
      products[k] = products[k] + g * (load_all<V>(z + q * kPanel<T>) - mu);
    };
    int64_t q = 0;
    for (; q + 2 <= pixels; q += 2) multiply(0, q), multiply(1, q + 1);
    if (q < pixels) multiply(0, q);
    T s[kPanel<T>], p[kPanel<T>];
    store_all(s, sums[0] + sums[1]);
    store_all(p, products[0] + products[1]);
    for (int i = 0; i < kPanel<T>; ++i) {
      plain[c + i] += double(s[i]);
      centered[c + i] += double(p[i]);
    }
  }
};

// σ(a z + b), or σ(z) where nothing is normalized, and its slope.
template <class T, class Act>
struct Activated {
  const T *scale, *shift;  // null: not normalized
  Signs signs;             // of relu's arguments

  struct Panel {
    PanelRow<T> scale, shift;
    bool normalized;
    Signs signs;
    int64_t index;

    RESODE_INLINE void operator()(PanelRow<T> z, int64_t pixel, PanelRow<T>& value,
                                  PanelRow<T>& slope) const {
      const PanelRow<T> u = normalized ? z * scale + shift : z;
      if constexpr (std::is_same_v<Act, resode::Relu>)
        if (signs.data) return signs.template apply<T>(u, pixel, index, value, slope);
      Act::template apply<Math<T>>(u, value, slope);
    }
  };

  RESODE_INLINE Panel panel(int64_t j) const {
    Panel panel{};
    panel.normalized = scale;
    panel.signs = signs;
    panel.index = j;
    if (scale) {
      panel.scale = load_all<PanelRow<T>>(scale + j * kPanel<T>);
      panel.shift = load_all<PanelRow<T>>(shift + j * kPanel<T>);
    }
    return panel;
  }
};

// da ← da ⊙ σ'(u), with z where u is computed from, for the pixels from `first` on
template <class Panel, class T>
void times_slope(Panel activated, const T* z, int64_t first, int64_t pixels, T* da) {
  for_each_pixel<T>(0, pixels, [&](int64_t at) RESODE_ALWAYS {
    PanelRow<T> value, slope;
    activated(load_all<PanelRow<T>>(z + at), first + at / kPanel<T>, value, slope);
    store_all(da + at, load_all<PanelRow<T>>(da + at) * slope);
  });
}

// dz = a (dy − k1 − (z − μ) k2)
template <class T>
struct NormalizedGradient {
  const T *dy, *z;
  Normalization<T> bn;
  bool batch;  // the statistics are the batch's

  RESODE_INLINE void operator()(int64_t panel, int64_t offset, T* to, int64_t pixels) const {
    using V = PanelRow<T>;
    const int64_t c = panel * kPanel<T>;
    const V a = load_all<V>(bn.scale + c), mu = load_all<V>(bn.mean + c);
    const V k1 = load_all<V>(bn.k1 + c), k2 = load_all<V>(bn.k2 + c);
    to -= offset;
    if (batch) {
      for_each_pixel<T>(offset, pixels, [&](int64_t at) RESODE_ALWAYS {
        const V g = load_all<V>(dy + at) - k1, d = load_all<V>(z + at) - mu;
        store_all(to + at, a * (g - d * k2));
      });
    } else {
      for_each_pixel<T>(offset, pixels, [&](int64_t at) RESODE_ALWAYS {
        store_all(to + at, a * load_all<V>(dy + at));
      });
    }
  }
};

}  // namespace
