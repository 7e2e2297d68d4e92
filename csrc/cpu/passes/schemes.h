// The two forward schemes,  x[n+1] = x[n] + h φ_n(x[n]):
//
//     Euler   φ_n(x) = f_n(x)
//     Heun    φ_n(x) = (a + b)/2  with  a = f_n(x),  y = x + h a,  b = f_{n+1}(y)
//
// and their reverse-time slopes ψ_n. Each works on the rows of one tile with one thread's
// BlockRunner. The VJPs leave out the factor c (Euler h, Heun h/2) that all parameter gradients
// share; it is multiplied in when the threads' sums are reduced.

#pragma once

#include "runner.h"

namespace {

template <class T, ResidualBlock<T> Block>
struct Euler {
  static constexpr int kSlots = 1;  // blocks that one step uses

  static T gradient_scale(T h) { return h; }

  // u(φ_n(p))
  static void slope(BlockRunner<T, Block>& r, int64_t n, Matrix<T> p, Update<T> u) {
    r.evaluate(n, n, p, u);
  }

  // u(ψ_n(x)) with ψ_n = f_n; `known` is f_n(x) if an earlier step has computed it.
  static void reverse_slope(BlockRunner<T, Block>& r, int64_t n, Matrix<T> x, const T* known,
                            Update<T> u) {
    if (known) return r.apply(known, x, u);
    r.evaluate(n, n, x, u);
  }

  // u(φ_n(p)), if u asks for it, and all that the VJP at p needs; keeps f_n(p) in `keep` if given.
  static void trace(BlockRunner<T, Block>& r, int64_t n, Matrix<T> p, T* keep, Update<T> u) {
    r.trace(n, n, p, r.traces[0]);
    if (keep) u.second.out = keep;
    if (!u.empty()) r.output(n, p, r.traces[0], u);
  }

  // ∇θ_n += ∂_θ f_n(p)ᵀ g,  g ← g + h ∂_x f_n(p)ᵀ g (unless g's result is not needed)
  static void vjp(BlockRunner<T, Block>& r, int64_t n, Matrix<T> p, Matrix<T> g,
                  bool result_needed) {
    Update<T> u;
    if (result_needed) u.first = {g.data, g.data, r.step};
    r.vjp(n, p, r.traces[0], g, u);
  }
};

template <class T, ResidualBlock<T> Block>
struct Heun {
  static constexpr int kSlots = 2;

  static T gradient_scale(T h) { return h / 2; }

  static void slope(BlockRunner<T, Block>& r, int64_t n, Matrix<T> p, Update<T> u) {
    two_stages(r, n, 0, r.step, p, nullptr, u);
  }

  // ψ_n(x) = (f_{n+1}(x) + f_n(x − h f_{n+1}(x)))/2: the same with time reversed.
  static void reverse_slope(BlockRunner<T, Block>& r, int64_t n, Matrix<T> x, const T* known,
                            Update<T> u) {
    two_stages(r, n, 1, -r.step, x, known, u);
  }

  static void trace(BlockRunner<T, Block>& r, int64_t n, Matrix<T> p, T* keep, Update<T> u) {
    T* const a = keep ? keep : r.first;
    const Matrix<T> y{r.middle, p.rows, p.columns};
    r.trace(n, 2 * n, p, r.traces[0]);
    r.output(n, p, r.traces[0], {{a}, {y.data, p.data, r.step}});
    r.trace(n + 1, 2 * n + 1, y, r.traces[1]);
    u.other = a;
    if (!u.empty()) r.output(n + 1, y, r.traces[1], u);
  }

  // With g' = ∂_x f_{n+1}(y)ᵀ g and c = h/2:
  //     ∇θ_{n+1} += ∂_θ f_{n+1}(y)ᵀ g,  ga = g + h g',  ∇θ_n += ∂_θ f_n(p)ᵀ ga,
  //     g ← g + c g' + c ∂_x f_n(p)ᵀ ga
  static void vjp(BlockRunner<T, Block>& r, int64_t n, Matrix<T> p, Matrix<T> g,
                  bool result_needed) {
    const T h = r.step, c = gradient_scale(h);
    const Matrix<T> y{r.middle, p.rows, p.columns}, ga{r.first, p.rows, p.columns};
    r.vjp(n + 1, y, r.traces[1], g, {{ga.data, g.data, h}, {g.data, g.data, c}});
    Update<T> u;
    if (result_needed) u.first = {g.data, g.data, c};
    r.vjp(n, p, r.traces[0], ga, u);
  }

 private:
  // Block n + i, then block n + 1 − i: evaluations 2 n and 2 n + 1 of the forward pass are of
  // blocks n and n + 1.
  static void two_stages(BlockRunner<T, Block>& r, int64_t n, int i, T h, Matrix<T> p,
                         const T* known, Update<T> u) {
    const Matrix<T> y{r.middle, p.rows, p.columns};
    const typename Update<T>::Line move{y.data, p.data, h};
    if (known) {
      r.apply(known, p, Update<T>{move, {}, nullptr});
    } else {
      r.evaluate(n + i, 2 * n + i, p, {{r.first}, move});
    }
    u.other = known ? known : r.first;
    r.evaluate(n + 1 - i, 2 * n + 1 - i, y, u);
  }
};

}  // namespace
