// The perceptron with one hidden layer.
//
// f(x) = W2 σ(W1 x + b1) + b2, with the rows of a tile as x:
//
//     z = x W1ᵀ + b1,  u = σ(z),  f = u W2ᵀ + b2
//     ∇W2 = gᵀ u,  ∇b2 = Σ g,  dz = (g W2) ⊙ σ'(z),  ∇W1 = dzᵀ x,  ∇b1 = Σ dz,  ∂fᵀ g = dz W1

#pragma once

#include "rows.h"

namespace {

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

  using RowBlock<T>::RowBlock;
  using RowBlock<T>::add_product;
  using RowBlock<T>::mine;
  using RowBlock<T>::meet;

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
      pack_transposed(w.w1_t, w1, d, mine(w.w1_t));
      pack_transposed(w.w2_t, w2, m, mine(w.w2_t));
      if (w.w1.data) {
        pack(w.w1, w1, m, mine(w.w1));
        pack(w.w2, w2, d, mine(w.w2));
      }
      if (w.b1) pack(Matrix<T>{w.b1, 1, m}, this->template parameter<S>(n, B1), 1, mine(w.w1_t));
      if (w.b2) pack(Matrix<T>{w.b2, 1, d}, this->template parameter<S>(n, B2), 1, mine(w.w2_t));
    });
  }

  Trace trace_space(Arena& arena, int64_t rows, bool vjp) const {
    const int64_t size = rows * padded<T>(s.hidden);
    return {arena.take<T>(size), vjp ? arena.take<T>(size) : nullptr};
  }

  void trace(const Weights& w, Matrix<T> p, Trace t, bool vjp, EvaluationSigns of_evaluation) {
    const Signs signs = of_evaluation.of(s.hidden);
    const Matrix<T> u{t.u, p.rows, s.hidden};
    if (signs.data && signs.known) {
      multiply(p, w.w1_t, w.b1, Update<T>{{t.u}}, mine(w.w1_t));
      by_signs(signs, u, vjp ? t.slope : nullptr);
      return meet();
    }
    with_activation(s.activation, [&](auto activation) {
      multiply(p, w.w1_t, w.b1, Activate<T, decltype(activation)>{t.u, vjp ? t.slope : nullptr},
               mine(w.w1_t));
    });
    meet();
    if (signs.data) signs.keep(u, this->share(signs.bytes));
  }

  void output(const Weights& w, Trace t, int64_t rows, Update<T> update) {
    multiply(Matrix<T>{t.u, rows, s.hidden}, w.w2_t, w.b2, update, mine(w.w2_t));
    meet();
  }

  void vjp(const Weights& w, Matrix<T> p, Trace t, Matrix<T> g, const Gradient<T>& sum,
           Update<T> update) {
    const Matrix<T> u{t.u, p.rows, s.hidden}, dz{t.slope, p.rows, s.hidden};
    add_product(sum, W2, g, u);
    if (sum.of[B2].data) sum_columns(g, sum.of[B2].data, sum.fresh, mine(g));
    if (sum.wants(W1) || sum.wants(B1) || !update.empty()) {
      multiply(g, w.w2, nullptr, TimesSlope<T>{t.slope}, mine(dz));
      meet();
      add_product(sum, W1, dz, p);
      if (sum.of[B1].data) sum_columns(dz, sum.of[B1].data, sum.fresh, mine(dz));
      if (!update.empty()) multiply(dz, w.w1, nullptr, update, mine(g));
    }
    meet();
  }

 private:
  // u ← relu(u) by the signs, and slope ← relu'(u), for this thread's panels.
  void by_signs(Signs signs, Matrix<T> u, T* slope) const {
    using V = PanelRow<T>;
    const Share panels = mine(u);
    for (int64_t j = panels.begin; j < panels.end; ++j)
      for (int64_t r = 0; r < u.rows; ++r) {
        V value, derivative;
        T* const at = u.at(j, r);
        signs.apply<T>(load_all<V>(at), r, j, value, derivative);
        store_all(at, value);
        if (slope) store_all(slope + (at - u.data), derivative);
      }
  }
};

static_assert(ResidualBlock<Mlp<float>, float> && ResidualBlock<Mlp<double>, double>);

}  // namespace
