// The two forward schemes,  x[n+1] = x[n] + h φ_n(x[n]):
//
//     Euler   φ_n(x) = f_n(x)
//     Heun    φ_n(x) = (a + b)/2  with  a = f_n(x),  y = x + h a,  b = f_{n+1}(y)
//
// and their reverse-time slopes ψ_n. Each works on the rows of one tile with one thread's Bench.
// The VJPs leave out the factor c (Euler h, Heun h/2) that all parameter gradients share; it is
// multiplied in when the threads' sums are reduced.

#pragma once

#include "../blocks/block.h"

namespace {

// What one thread works with: the packed weights and gradient sums of the blocks in work, and
// buffers for a tile. Blocks live in slots: Heun's neighbours in two, a tied stage's only block in
// one. Gradient sums have Block::kAhead slots more, so that a thread can go on while others are
// still at the step before (pass.h).

template <class T, class Block>
struct Bench {
  Block block;
  void* const* results;  // the table of the gradients that are wanted
  int slots;
  bool tied;
  bool whole;  // a gradient of more than one row is one product, and needs no sum
  T step;      // h
  typename Block::Weights weights[2] = {};
  Gradient<T> gradients[2 + Block::kAhead] = {};
  typename Block::Trace traces[2] = {};
  T* point = nullptr;                     // p, where it is not the state itself
  T *first = nullptr, *middle = nullptr;  // Heun's a and y

  int64_t index(int64_t n) const { return tied ? 0 : n; }
  int64_t slot(int64_t n) const { return index(n) % slots; }
  Gradient<T>& gradient(int64_t n) { return gradients[index(n) % gradient_slots()]; }
  int gradient_slots() const { return tied ? 1 : slots + Block::kAhead; }
  bool is_whole(int k) const { return whole && block.shape(k).rows > 1; }
  void* result(int64_t n, int k) const { return results[index(n) * block.s.count + k]; }

  // u(values), which have the place and shape of x's in a matrix of their own
  void apply(const T* values, Matrix<T> x, Update<T> u) {
    const Matrix<T> mine = x.part(block.mine(x));
    const int64_t begin = mine.data - x.data;
    for_each_vector(values, begin, begin + mine.size(), u);
    block.meet();
  }
  // u(f_n(p))
  void evaluate(int64_t n, Matrix<T> p, Update<T> u) {
    trace(n, p, traces[0], false);
    output(n, p, traces[0], u);
  }
  void trace(int64_t n, Matrix<T> p, typename Block::Trace t, bool vjp = true) {
    block.trace(weights[slot(n)], p, t, vjp);
  }
  void output(int64_t n, Matrix<T> p, typename Block::Trace t, Update<T> u) {
    block.output(weights[slot(n)], t, p.rows, u);
  }
  // ∇θ_n += ∂_θ f_n(p)ᵀ g,  u(∂_x f_n(p)ᵀ g)
  void vjp(int64_t n, Matrix<T> p, typename Block::Trace t, Matrix<T> g, Update<T> u) {
    Gradient<T> wanted = gradient(n);
    for (int k = 0; k < block.s.count; ++k) {
      if (!result(n, k)) wanted.of[k].data = nullptr;
      if (is_whole(k)) wanted.whole[k] = static_cast<T*>(result(n, k));
    }
    block.vjp(weights[slot(n)], p, t, g, wanted, u);
    gradient(n).fresh = false;
  }
};

template <class T, class Block>
struct Euler {
  static constexpr int kSlots = 1;  // blocks that one step uses

  static T gradient_scale(T h) { return h; }

  // u(φ_n(p))
  static void slope(Bench<T, Block>& b, int64_t n, Matrix<T> p, Update<T> u) {
    b.evaluate(n, p, u);
  }

  // u(ψ_n(x)) with ψ_n = f_n; `known` is f_n(x) if an earlier step has computed it.
  static void reverse_slope(Bench<T, Block>& b, int64_t n, Matrix<T> x, const T* known,
                            Update<T> u) {
    if (known) return b.apply(known, x, u);
    b.evaluate(n, x, u);
  }

  // u(φ_n(p)), if u asks for it, and all that the VJP at p needs; keeps f_n(p) in `keep` if given.
  static void trace(Bench<T, Block>& b, int64_t n, Matrix<T> p, T* keep, Update<T> u) {
    b.trace(n, p, b.traces[0]);
    if (keep) u.second.out = keep;
    if (!u.empty()) b.output(n, p, b.traces[0], u);
  }

  // ∇θ_n += ∂_θ f_n(p)ᵀ g,  g ← g + h ∂_x f_n(p)ᵀ g (unless g's result is not needed)
  static void vjp(Bench<T, Block>& b, int64_t n, Matrix<T> p, Matrix<T> g, bool result_needed) {
    Update<T> u;
    if (result_needed) u.first = {g.data, g.data, b.step};
    b.vjp(n, p, b.traces[0], g, u);
  }
};

template <class T, class Block>
struct Heun {
  static constexpr int kSlots = 2;

  static T gradient_scale(T h) { return h / 2; }

  static void slope(Bench<T, Block>& b, int64_t n, Matrix<T> p, Update<T> u) {
    two_stages(b, n, n + 1, b.step, p, nullptr, u);
  }

  // ψ_n(x) = (f_{n+1}(x) + f_n(x − h f_{n+1}(x)))/2: the same with time reversed.
  static void reverse_slope(Bench<T, Block>& b, int64_t n, Matrix<T> x, const T* known,
                            Update<T> u) {
    two_stages(b, n + 1, n, -b.step, x, known, u);
  }

  static void trace(Bench<T, Block>& b, int64_t n, Matrix<T> p, T* keep, Update<T> u) {
    T* const a = keep ? keep : b.first;
    const Matrix<T> y{b.middle, p.rows, p.columns};
    b.trace(n, p, b.traces[0]);
    b.output(n, p, b.traces[0], {{a}, {y.data, p.data, b.step}});
    b.trace(n + 1, y, b.traces[1]);
    u.other = a;
    if (!u.empty()) b.output(n + 1, y, b.traces[1], u);
  }

  // With g' = ∂_x f_{n+1}(y)ᵀ g and c = h/2:
  //     ∇θ_{n+1} += ∂_θ f_{n+1}(y)ᵀ g,  ga = g + h g',  ∇θ_n += ∂_θ f_n(p)ᵀ ga,
  //     g ← g + c g' + c ∂_x f_n(p)ᵀ ga
  static void vjp(Bench<T, Block>& b, int64_t n, Matrix<T> p, Matrix<T> g, bool result_needed) {
    const T h = b.step, c = gradient_scale(h);
    const Matrix<T> y{b.middle, p.rows, p.columns}, ga{b.first, p.rows, p.columns};
    b.vjp(n + 1, y, b.traces[1], g, {{ga.data, g.data, h}, {g.data, g.data, c}});
    Update<T> u;
    if (result_needed) u.first = {g.data, g.data, c};
    b.vjp(n, p, b.traces[0], ga, u);
  }

 private:
  static void two_stages(Bench<T, Block>& b, int64_t first, int64_t second, T h, Matrix<T> p,
                         const T* known, Update<T> u) {
    const Matrix<T> y{b.middle, p.rows, p.columns};
    const typename Update<T>::Line move{y.data, p.data, h};
    if (known) {
      b.apply(known, p, Update<T>{move, {}, nullptr});
    } else {
      b.evaluate(first, p, {{b.first}, move});
    }
    u.other = known ? known : b.first;
    b.evaluate(second, y, u);
  }
};

}  // namespace
