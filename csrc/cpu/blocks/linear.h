// The linear block.
//
// f(x) = θ x:  f = x θᵀ,  ∇θ = gᵀ x,  ∂fᵀ g = g θ. The trace is a copy of p.

#pragma once

#include "rows.h"

namespace {

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

  using RowBlock<T>::RowBlock;
  using RowBlock<T>::add_product;
  using RowBlock<T>::mine;
  using RowBlock<T>::meet;

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
      pack_transposed(w.theta_t, theta, s.dim, mine(w.theta_t));
      if (w.theta.data) pack(w.theta, theta, s.dim, mine(w.theta));
    });
  }

  Trace trace_space(Arena& arena, int64_t rows, bool vjp) const {
    const int64_t size = rows * padded<T>(s.dim);
    return {arena.take<T>(size), vjp ? arena.take<T>(size) : nullptr};
  }

  void trace(const Weights&, Matrix<T> p, Trace t, bool, EvaluationSigns) { copy(t.p, p); }

  void output(const Weights& w, Trace t, int64_t rows, Update<T> update) {
    multiply(Matrix<T>{t.p, rows, s.dim}, w.theta_t, nullptr, update, mine(w.theta_t));
    meet();
  }

  void vjp(const Weights& w, Matrix<T>, Trace t, Matrix<T> g, const Gradient<T>& sum,
           Update<T> update) {
    const Matrix<T> p{t.p, g.rows, s.dim}, kept{t.g, g.rows, s.dim};
    add_product(sum, 0, g, p);
    if (!update.empty()) {
      copy(kept.data, g);
      multiply(kept, w.theta, nullptr, update, mine(g));
    }
    meet();
  }

 private:
  void copy(T* to, Matrix<T> m) {
    const Matrix<T> part = m.part(mine(m));
    memcpy(to + (part.data - m.data), part.data, part.size() * sizeof(T));
    meet();
  }
};

static_assert(ResidualBlock<Linear<float>, float> && ResidualBlock<Linear<double>, double>);

}  // namespace
