// The residual functions f that work row by row, one class each (conv.h has the one for images). A
// block class knows its parameters and, for the rows of one tile, three things:
//
//     trace    what the VJP at p will need of f's evaluation there
//     output   f(p) from the trace, handed to an Update
//     vjp      the parameter gradients, summed up, and ∂f(p)ᵀ g, handed to an Update
//
// An Update may overwrite p (trace, output) or g (vjp): both are read before. In a crew of several
// threads (team.h) each of the three computes the thread's share of the columns and returns when
// all is there.

#pragma once

#include "arena.h"
#include "epilogues.h"
#include "gemm.h"
#include "storage.h"
#include "team.h"

namespace {

using resode::kMaxParameters;
using resode::Stage;

// The gradient sums of one block, in the order of the parameters; null data: not wanted. Instead of
// a sum there may be the gradient itself, if one product is all of it.
template <class T>
struct Gradient {
  Matrix<T> of[kMaxParameters];
  bool fresh = true;  // nothing summed yet
  T* whole[kMaxParameters] = {};
  T scale = 1;  // c: a gradient is c times its sum, or its one product

  bool wants(int k) const { return of[k].data || whole[k]; }
};

// Whether any block's k-th gradient is wanted; `gradients` is a table like the parameters'.
inline bool is_wanted(const Stage& s, void* const* gradients, int k) {
  for (int64_t n = 0; gradients && n < s.blocks(); ++n)
    if (gradients[n * s.count + k]) return true;
  return false;
}

// sum[j] ← Σ_i m[i, j] for some panels, added to what is there unless fresh
template <class T>
void sum_columns(Matrix<T> m, T* sum, bool fresh, Share panels) {
  constexpr int kChains = 4;  // independent sums, so that latency is hidden
  for (int64_t j = panels.begin; j < panels.end; ++j)
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

// What blocks of rows have in common.
template <class T>
struct RowBlock {
  struct Shared {
    int crew;  // threads in one
    Countdown* arrivals;

    Shared(const Stage&, const Tiling& tiling, Arena& arena, int /*slots*/, void* const*)
        : crew(tiling.crew), arrivals(arena.take<Countdown>(tiling.threads)) {
      for (int t = 0; arena.real() && t < tiling.threads; ++t) arrivals[t].value = 0;
    }
  };
  static constexpr int kAhead = 2;  // steps that a thread may be ahead of another, less one
  static constexpr bool kWritesWhole = true;  // gradients that are one product

  const Stage& s;
  const int index, crews;  // which of the crews this thread is in
  Crew crew;

  RowBlock(const Stage& s, const Shared& shared, Team team)
      : s(s),
        index(team.crew_index(shared.crew)),
        crews(team.crews(shared.crew)),
        crew(team.crew(shared.crew), shared.arrivals + index * shared.crew) {}

  static Tiling tiling(const Stage& s) { return Tiling::of_rows<T>(s); }

  void record(void*) {}  // no statistics

  T* shared_sum(int /*slot*/, int /*k*/) const { return nullptr; }

  // out ← scale · Σ sums of the crews, one worker's share; `sum` is that of its own crew, the next
  // one's lies `stride` further on
  template <class S>
  void write_gradient(int, S* out, Matrix<T> sum, int64_t stride, T scale) const {
    sum.data -= index * stride;
    reduce(out, sum, stride, crews, scale, Share(sum.rows, index, crews), mine(sum));
  }

  // The thread's share of the panels of a matrix whose columns the crew divides.
  Share mine(Matrix<T> m) const { return crew.share(m.panels()); }
  void meet() { crew.meet(); }
  bool leads() const { return crew.team.rank == 0; }

 protected:
  // aᵀ b is added to the k-th gradient's sum, or written if it is all of the gradient.
  void add_product(const Gradient<T>& gradient, int k, Matrix<T> a, Matrix<T> b) {
    if (T* const whole = gradient.whole[k]) {
      const WriteRows<T> write{whole, a.columns, b.columns, gradient.scale};
      multiply_transposed(a, b, write, mine(b));
    } else if (T* const sum = gradient.of[k].data) {
      multiply_transposed(a, b, Accumulate<T>{sum, gradient.fresh}, mine(b));
    }
  }

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

  void trace(const Weights& w, Matrix<T> p, Trace t, bool vjp) {
    with_activation(s.activation, [&](auto activation) {
      multiply(p, w.w1_t, w.b1, Activate<T, decltype(activation)>{t.u, vjp ? t.slope : nullptr},
               mine(w.w1_t));
    });
    meet();
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

  void trace(const Weights&, Matrix<T> p, Trace t, bool) { copy(t.p, p); }

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

}  // namespace
