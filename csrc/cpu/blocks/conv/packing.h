// The parameters of a layer, packed: its windows at all points of the products, and the vectors of
// its normalization.

#pragma once

#include "../../core/arena.h"
#include "../../core/storage.h"
#include "../../core/team.h"
#include "winograd.h"

namespace {

// The parameters of a layer in their order (stage.h).
enum LayerParameter { kWeight, kGamma, kBeta, kMean, kVariance, kPerLayer };

template <class S>
const S* layer_parameter(const Stage& s, int64_t n, int l, LayerParameter which) {
  return static_cast<const S*>(s.parameters[n * s.count + l * kPerLayer + which]);
}

// One layer's parameters, packed.
template <class T>
struct Layer {
  Matrix<T> w, w_t;  // at all points: inputs × outputs, and for VJPs outputs × inputs, turned
  T *gamma, *beta, *mean, *variance;

  Layer() = default;
  Layer(const Stage& s, int l, Arena& arena, bool vjp) {
    const int64_t in = s.convolutions[l].in, out = s.convolutions[l].out;
    const int64_t points = window_of(s, l).points();
    w = arena.matrix<T>(points * padded<T>(in), out);
    if (vjp) w_t = arena.matrix<T>(points * padded<T>(out), in);
    for (T** vector : {&gamma, &beta, &mean, &variance}) *vector = arena.take<T>(padded<T>(out));
  }
};

// g ← the windows of output o and of inputs i, i + 1, … (lanes), which lie one after the other;
// windows beyond the last input are zero. The windows of the next inputs are prefetched: they are
// read after those of the other outputs, and no hardware prefetcher follows so many rows.
template <class T, class S>
RESODE_INLINE void read_windows(const S* windows, resode::Convolution shape, int64_t o, int64_t i,
                                Vec<T> (&g)[kMaxTaps]) {
  constexpr int L = kLanes<T>;
  const int64_t taps = shape.size * shape.size, first = (o * shape.in + i) * taps,
                left = shape.out * shape.in * taps - first;  // numbers from there to the end
  const S* const from = windows + first;
  for (int64_t k = 0; k < L * taps; k += 64 / sizeof(S)) __builtin_prefetch(from + L * taps + k);
  if (taps == 1) {
    g[0] = load_widened<T>(from, shape.in - i);
    return;
  }
#pragma GCC unroll 3
  for (int t = 0; t < kMaxTaps; t += L) {
    Vec<T> square[L];
#pragma GCC unroll 16
    for (int k = 0; k < L; ++k) {
      const int64_t at = k * kMaxTaps + t;  // a vector may be more than the window, or less
      square[k] = load_widened<T>(from + at, i + k < shape.in ? left - at : 0);
    }
    transpose<T>(square);
#pragma GCC unroll 16
    for (int k = 0; k < L; ++k)
      if (t + k < kMaxTaps) g[t + k] = square[k];
  }
}

// Windows at all points, a square of outputs × inputs at a time: lanes are inputs where windows
// are read and in w_t, and outputs in w.
template <class T, class S>
void pack_windows(const Layer<T>& to, const S* windows, resode::Convolution shape, int64_t points,
                  Team team) {
  constexpr int L = kLanes<T>;
  const int64_t across = padded<T>(shape.in) / L, down = padded<T>(shape.out) / L;
  const Share share(across * down, team.rank, team.size);
  for (int64_t square = share.begin; square < share.end; ++square) {
    const int64_t o = square / across * L, i = square % across * L;
    Vec<T> u[kPoints][L];
    for (int k = 0; k < L; ++k) {
      Vec<T> g[kMaxTaps] = {}, lifted[kPoints] = {};
      if (o + k < shape.out) {
        read_windows<T>(windows, shape, o + k, i, g);
        if (points == 1) {
          lifted[0] = g[0];
        } else {
          lift_window(g, lifted);
        }
      }
      for (int64_t point = 0; point < points; ++point) u[point][k] = lifted[point];
    }
    for (int64_t point = 0; point < points; ++point) {
      if (to.w_t.data) {
        const Matrix<T> turned = weights_at(to.w_t, points, points == 1 ? 0 : turn_point(point));
        for (int k = 0; k < L; ++k)
          store(turned.at(i / kPanel<T>, o + k) + i % kPanel<T>, u[point][k]);
      }
      transpose<T>(u[point]);
      const Matrix<T> plain = weights_at(to.w, points, point);
      for (int k = 0; k < L; ++k)
        store(plain.at(o / kPanel<T>, i + k) + o % kPanel<T>, u[point][k]);
    }
  }
}

// One thread's share of the layer's parameters in block n; the first thread packs the vectors.
template <class S, class T>
void pack_layer(const Layer<T>& to, const Stage& s, int64_t n, int l, Team team) {
  pack_windows(to, layer_parameter<S>(s, n, l, kWeight), s.convolutions[l],
               window_of(s, l).points(), team);
  if (team.rank > 0) return;
  const int64_t out = s.convolutions[l].out;
  const auto vector = [&](T* v, LayerParameter which, T otherwise) {
    const S* from = layer_parameter<S>(s, n, l, which);
    for (int64_t c = 0; c < padded<T>(out); ++c)
      v[c] = c >= out ? T(0) : from ? T(widen(from[c])) : otherwise;
  };
  vector(to.gamma, kGamma, 1);
  vector(to.beta, kBeta, 0);
  vector(to.mean, kMean, 0);
  vector(to.variance, kVariance, 1);
}

}  // namespace
