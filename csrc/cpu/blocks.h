// The residual functions f that work row by row, one class each (conv.h has the one for images). A
// block class knows its parameters and, for the rows of one tile, three things:
//
//     trace    what the VJP at p will need of f's evaluation there
//     output   f(p) from the trace, handed to an Update
//     vjp      the parameter gradients, summed up, and ∂f(p)ᵀ g, handed to an Update
//
// An Update may overwrite p (trace, output) or g (vjp): both are read before.

#pragma once

#include "arena.h"
#include "epilogues.h"
#include "gemm.h"
#include "storage.h"
#include "team.h"

namespace {

using resode::kMaxParameters;
using resode::Stage;

// The gradient sums of one block, in the order of the parameters; null data: not wanted.
template <class T>
struct Gradient {
  Matrix<T> of[kMaxParameters];
  bool fresh = true;  // nothing summed yet
};

// sum[j] ← Σ_i m[i, j], added to what is there unless fresh
template <class T>
void sum_columns(Matrix<T> m, T* sum, bool fresh) {
  constexpr int kChains = 4;  // independent sums, so that latency is hidden
  for (int64_t j = 0; j < m.panels(); ++j)
    for (int c = 0; c < kPanel<T>; c += kLanes<T>) {
      Vec<T> chain[kChains] = {};
      int64_t i = 0;
      for (; i + kChains <= m.rows; i += kChains)
        for (int k = 0; k < kChains; ++k) chain[k] += load(m.at(j, i + k) + c);
      for (; i < m.rows; ++i) chain[0] += load(m.at(j, i) + c);
      const Vec<T> total = (chain[0] + chain[1]) + (chain[2] + chain[3]);
      T* const out = sum + j * kPanel<T> + c;
      store(out, fresh ? total : load(out) + total);
    }
}

template <class F>
void with_activation(resode::Activation activation, F f) {
  switch (activation) {
    case resode::Activation::relu:
      return f(resode::Relu{});
    case resode::Activation::tanh:
      return f(resode::Tanh{});
    case resode::Activation::gelu:
      return f(resode::Gelu{});
    case resode::Activation::silu:
      return f(resode::Silu{});
    case resode::Activation::identity:
      return;  // no block applies it
  }
}

// What blocks of rows have in common: threads share nothing.
template <class T>
struct RowBlock {
  struct Shared {
    Shared(const Stage&, const Tiling&, Arena&, int /*slots*/, bool /*vjp*/) {}
  };
  static constexpr int kAhead = 2;  // steps that a thread may be ahead of another, less one

  const Stage& s;

  static Tiling tiling(const Stage& s) { return Tiling::of_rows<T>(s); }

  void record(void*) {}  // no statistics

  // out ← scale · Σ sums of the threads, one worker's share
  template <class S>
  void write_gradient(int, S* out, Matrix<T> sum, int64_t stride, Team team, T scale) const {
    reduce(out, sum, stride, team.size, scale, Share(sum.rows, team.rank, team.size));
  }

 protected:
  template <class S>
  const S* parameter(int64_t n, int k) const {
    return static_cast<const S*>(s.parameters[n * s.count + k]);
  }
};

// f(x) = W2 σ(W1 x + b1) + b2, with the rows of a tile as x:
//
//     z = x W1ᵀ + b1,  u = σ(z),  f = u W2ᵀ + b2
//     ∇W2 = gᵀ u,  ∇b2 = Σ g,  dz = (g W2) ⊙ σ'(z),  ∇W1 = dzᵀ x,  ∇b1 = Σ dz,  ∂fᵀ g = dz W1
template <class T>
class Mlp : public RowBlock<T> {
 public:
  using RowBlock<T>::s;
  struct Weights {
    Matrix<T> w1_t, w2_t, w1, w2;
    T *b1, *b2;
  };
  struct Trace {
    T *u, *slope;
  };
  enum { W1, B1, W2, B2 };

  Mlp(const Stage& s, const typename RowBlock<T>::Shared&, Team) : RowBlock<T>{s} {}

  // Gradient sums have their parameter's shape.
  Matrix<T> shape(int parameter) const {
    const bool one_row = parameter == B1 || parameter == B2,
               out = parameter == W2 || parameter == B2;
    const int64_t rows = out ? s.dim : s.hidden, columns = out ? s.hidden : s.dim;
    return one_row ? Matrix<T>{nullptr, 1, rows} : Matrix<T>{nullptr, rows, columns};
  }

  Weights weights(Arena& arena, int /*slot*/, bool vjp) const {
    Weights w;
    w.w1_t = arena.matrix<T>(padded<T>(s.dim), s.hidden);
    w.w2_t = arena.matrix<T>(padded<T>(s.hidden), s.dim);
    w.b1 = s.parameters[B1] ? arena.take<T>(padded<T>(s.hidden)) : nullptr;
    w.b2 = s.parameters[B2] ? arena.take<T>(padded<T>(s.dim)) : nullptr;
    if (vjp) {
      w.w1 = arena.matrix<T>(padded<T>(s.hidden), s.dim);
      w.w2 = arena.matrix<T>(padded<T>(s.dim), s.hidden);
    }
    return w;
  }

  void pack_weights(const Weights& w, int64_t n) const {
    with_storage<T>(s.storage, [&](auto storage) {
      using S = decltype(storage);
      const int64_t d = s.dim, m = s.hidden;
      const S* w1 = this->template parameter<S>(n, W1);
      const S* w2 = this->template parameter<S>(n, W2);
      pack_transposed(w.w1_t, w1, d);
      pack_transposed(w.w2_t, w2, m);
      if (w.w1.data) {
        pack(w.w1, w1, m);
        pack(w.w2, w2, d);
      }
      if (w.b1) pack(Matrix<T>{w.b1, 1, m}, this->template parameter<S>(n, B1), 1);
      if (w.b2) pack(Matrix<T>{w.b2, 1, d}, this->template parameter<S>(n, B2), 1);
    });
  }

  Trace trace_space(Arena& arena, int64_t rows, bool vjp) const {
    const int64_t size = rows * padded<T>(s.hidden);
    return {arena.take<T>(size), vjp ? arena.take<T>(size) : nullptr};
  }

  void trace(const Weights& w, Matrix<T> p, Trace t, bool vjp) const {
    with_activation(s.activation, [&](auto activation) {
      multiply(p, w.w1_t, w.b1, Activate<T, decltype(activation)>{t.u, vjp ? t.slope : nullptr});
    });
  }

  void output(const Weights& w, Trace t, int64_t rows, Update<T> update) const {
    multiply(Matrix<T>{t.u, rows, s.hidden}, w.w2_t, w.b2, update);
  }

  void vjp(const Weights& w, Matrix<T> p, Trace t, Matrix<T> g, const Gradient<T>& sum,
           Update<T> update) const {
    const Matrix<T> u{t.u, p.rows, s.hidden}, dz{t.slope, p.rows, s.hidden};
    if (sum.of[W2].data) multiply_transposed(g, u, Accumulate<T>{sum.of[W2].data, sum.fresh});
    if (sum.of[B2].data) sum_columns(g, sum.of[B2].data, sum.fresh);
    if (!sum.of[W1].data && !sum.of[B1].data && update.empty()) return;
    multiply(g, w.w2, nullptr, TimesSlope<T>{t.slope});
    if (sum.of[W1].data) multiply_transposed(dz, p, Accumulate<T>{sum.of[W1].data, sum.fresh});
    if (sum.of[B1].data) sum_columns(dz, sum.of[B1].data, sum.fresh);
    if (!update.empty()) multiply(dz, w.w1, nullptr, update);
  }
};

// f(x) = θ x:  f = x θᵀ,  ∇θ = gᵀ x,  ∂fᵀ g = g θ. The trace is a copy of p.
template <class T>
class Linear : public RowBlock<T> {
 public:
  using RowBlock<T>::s;
  struct Weights {
    Matrix<T> theta_t, theta;
  };
  struct Trace {
    T *p, *g;
  };

  Linear(const Stage& s, const typename RowBlock<T>::Shared&, Team) : RowBlock<T>{s} {}

  Matrix<T> shape(int) const { return {nullptr, s.dim, s.dim}; }

  Weights weights(Arena& arena, int /*slot*/, bool vjp) const {
    Weights w;
    w.theta_t = arena.matrix<T>(padded<T>(s.dim), s.dim);
    if (vjp) w.theta = arena.matrix<T>(padded<T>(s.dim), s.dim);
    return w;
  }

  void pack_weights(const Weights& w, int64_t n) const {
    with_storage<T>(s.storage, [&](auto storage) {
      const auto* theta = this->template parameter<decltype(storage)>(n, 0);
      pack_transposed(w.theta_t, theta, s.dim);
      if (w.theta.data) pack(w.theta, theta, s.dim);
    });
  }

  Trace trace_space(Arena& arena, int64_t rows, bool vjp) const {
    const int64_t size = rows * padded<T>(s.dim);
    return {arena.take<T>(size), vjp ? arena.take<T>(size) : nullptr};
  }

  void trace(const Weights&, Matrix<T> p, Trace t, bool) const {
    memcpy(t.p, p.data, p.size() * sizeof(T));
  }

  void output(const Weights& w, Trace t, int64_t rows, Update<T> update) const {
    multiply(Matrix<T>{t.p, rows, s.dim}, w.theta_t, nullptr, update);
  }

  void vjp(const Weights& w, Matrix<T>, Trace t, Matrix<T> g, const Gradient<T>& sum,
           Update<T> update) const {
    const Matrix<T> p{t.p, g.rows, s.dim}, copy{t.g, g.rows, s.dim};
    if (sum.of[0].data) multiply_transposed(g, p, Accumulate<T>{sum.of[0].data, sum.fresh});
    if (update.empty()) return;
    memcpy(copy.data, g.data, g.size() * sizeof(T));
    multiply(copy, w.theta, nullptr, update);
  }
};

}  // namespace
