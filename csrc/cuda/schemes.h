// The schemes of a depth-fused stage, x[n+1] = x[n] + h φ_n(x[n]), and the rules of its reverse
// pass, for a tile of rows; in the words of resode_kernels/reference.py.
//
// Scheme and rule are the same for all threads of a launch, and known only at run time. Loops that
// are not unrolled hold the code of a block's evaluation to one copy for the forward pass and two
// for the reverse pass.

#pragma once

#include "blocks.h"

namespace resode {

template <class Blocks>
class Steps {
 public:
  __device__ Steps(const Network& net, bool reverse)
      : net_(net), heun_(net.scheme == Scheme::heun), blocks_(net, reverse) {}

  // φ_n(x): under Euler f_n(x), under Heun (a + b)/2 with a = f_n(x), b = f_{n+1}(x + h a). `next`:
  // the block that is evaluated afterwards, −1: none is.
  __device__ __forceinline__ State slope(const Place& place, const State& x, int n, int next) {
    return mean(place, x, n, n + 1, net_.h, next, false, x);
  }

  // Begins a reverse pass with the state x̃, which is kept in shared memory to leave registers free.
  __device__ __forceinline__ void begin(const Place& place, const State& x) {
    set_state(place, x);
    known_ = false;
  }
  __device__ __forceinline__ State state(const Place& place) const {
    return place.take(blocks_.resting());
  }

  // Step n of the reverse pass: moves the state from x̃[n+1] to x̃[n] and the cotangent likewise, and
  // adds to the gradients of the parameters. Under Heun, with y = p + h f_n(p):
  //
  //   gy = ∂_x f_{n+1}(y)ᵀ (h/2) g,   gx = ∂_x f_n(p)ᵀ (h/2 g + h gy),   g ← g + gy + gx
  __device__ __forceinline__ void reverse(const Place& place, const ReverseWalk& walk, int n,
                                          bool first_tile, State& g) {
    const bool paper = walk.reverse_rule == ReverseRule::paper,
               moves = !paper && walk.reverse_rule != ReverseRule::exact;
    const bool last_step = n + 1 == net_.steps;
    restart(place, walk, n);
    const State p = point(place, walk, n);
    if (walk.nonfinite && !place.is_finite(p)) atomicMax(walk.nonfinite, n);
    if (paper) set_state(place, p);
    // Whether f_n(p) is what the reverse-time step n − 1 evaluates first.
    known_ = paper && (heun_ || net_.tied);
    const bool begins_above = heun_ && walk.reverse_rule == ReverseRule::refined;
    const int next = n == walk.begin ? -1 : begins_above ? n : n - 1;

    // Evaluates f_n at p (2), then makes the VJPs of f_{n+1} at y (1) and of f_n at p (0).
    State at = p, cotangent = g;
#pragma unroll 1
    for (int k = heun_ ? 2 : 0; k >= 0; --k) {
      const bool evaluates = k == 2, values = k == heun_;
      const int block = n + k % 2;
      // It has no sums yet if this is the first of its steps to be made, with the first tile.
      const bool newest = net_.tied ? last_step && values : k == 0 || last_step;
      const Gradients gradients(walk.sums, net_.block(block), first_tile && newest);
      State value;
      const bool wanted = evaluates || (values && (moves || (known_ && !heun_)));
      const State gx =
          blocks_.evaluate(place, at, block, k == 0 ? next : n + k - 1, wanted, value, !evaluates,
                           cotangent, k == 1 ? 0.5f * net_.h : net_.h, &gradients);
      if (evaluates) {
        first_ = value;
        at = fma(net_.h, value, p);
        continue;
      }
      if (values) {
        if (moves) move(place, walk, n, heun_ ? 0.5f * (first_ + value) : value);
        if (!heun_) first_ = value;
      }
      cotangent = fma(0.5f, g, gx);
      at = p;
      g = g + gx;
    }
  }

 private:
  __device__ __forceinline__ void set_state(const Place& place, const State& x) const {
    place.put(blocks_.resting(), x);
  }

  // Under Euler f_i(x), under Heun (a + b)/2 with a = f_i(x), b = f_j(x + s a). `known`: a is
  // given.
  __device__ __forceinline__ State mean(const Place& place, const State& x, int i, int j, float s,
                                        int next, bool known, const State& a) {
    State result = a, at = known ? fma(s, a, x) : x;
#pragma unroll 1
    for (int k = known; k <= heun_; ++k) {
      State value;
      blocks_.evaluate(place, at, k ? j : i, k < heun_ ? j : next, true, value, false, at, 0,
                       nullptr);
      result = k ? 0.5f * (result + value) : value;
      at = fma(s, value, x);
    }
    return result;
  }

  // p of step n, given the state x = x̃[n+1]: extrapolated from the newest evaluations of φ if there
  // are any, else by the reverse-time step x − h ψ_n(x); then corrected, p ← x − h φ_n(p).
  __device__ __forceinline__ State point(const Place& place, const ReverseWalk& walk, int n) {
    const float h = net_.h;
    const bool predicted = walk.reverse_rule == ReverseRule::predicted;
    const int have = predicted ? min(walk.order, net_.steps - 1 - n) : 0;
    State p = state(place);
    if (have) {
      State total{};
#pragma unroll 1
      for (int i = 0; i < have; ++i) {
        const float* const past = walk.history + (n + 1 + i) % walk.order * net_.rows * net_.dim;
        const int factor = i == 0 ? have : i == 2 ? 1 : have == 2 ? -1 : -3;  // of extrapolation
        total = fma(float(factor), place.load(past), total);
      }
      p = fma(-h, total, p);
    }
    const int evaluations = walk.reverse_rule == ReverseRule::exact             ? 0
                            : walk.reverse_rule == ReverseRule::paper           ? 1
                            : walk.reverse_rule == ReverseRule::refined || have ? walk.order - have
                                                                                : walk.order + 1;
#pragma unroll 1
    for (int i = 0; i < evaluations; ++i) {
      const bool backwards = heun_ && i == 0 && !have;
      const State slope = mean(place, p, backwards ? n + 1 : n, backwards ? n : n + 1,
                               backwards ? -h : h, n, known_, first_);
      p = fma(-h, slope, state(place));
    }
    return p;
  }

  // x̃[n] = x̃[n+1] − h φ_n(p)
  __device__ __forceinline__ void move(const Place& place, const ReverseWalk& walk, int n,
                                       const State& slope) const {
    set_state(place, fma(-net_.h, slope, state(place)));
    if (walk.reverse_rule == ReverseRule::predicted)
      place.store(walk.history + n % walk.order * net_.rows * net_.dim, slope);
  }

  // The state that step n starts from, where there is an anchor.
  __device__ __forceinline__ void restart(const Place& place, const ReverseWalk& walk, int n) {
    const int64_t size = net_.rows * net_.dim;
    if (walk.reverse_rule == ReverseRule::exact) {
      const int i = n - walk.states_begin;
      set_state(place, place.load(i ? walk.states + (i - 1) * size : walk.start));
    } else if (walk.anchor_every && n + 1 < net_.steps && (n + 1) % walk.anchor_every == 0) {
      begin(place, place.load(walk.anchors + ((n + 1) / walk.anchor_every - 1) * size));
    }
  }

  const Network& net_;
  const int heun_;
  Blocks blocks_;
  State first_;         // f_n(p) of the step that was made last
  bool known_ = false;  // whether it is the first evaluation of the next reverse-time step
};

}  // namespace resode
