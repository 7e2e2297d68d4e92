// The interface between residual blocks f (one file each beside this one) and the passes that run
// them. A block knows its parameters and computes, for the rows of one tile:
//
//     trace    what the VJP at p needs of f's evaluation there
//     output   f(p) from the trace, handed to an Update
//     vjp      the parameter gradients, summed up, and ∂f(p)ᵀ g, handed to an Update
//
// An Update may overwrite p (trace, output) or g (vjp): both are read before. In a crew of several
// threads (team.h) each of the three computes the thread's share of the columns and returns when
// the whole result is there.

#pragma once

#include <concepts>

#include "../core/arena.h"
#include "../core/epilogues.h"
#include "../core/signs.h"
#include "../core/team.h"

namespace {

using resode::kMaxLayers;
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

// What passes and schemes use of a block class B with a stream of T. An object of B is one
// thread's.
template <class B, class T>
concept ResidualBlock =
    // Packed parameters of one block of the stage; what an evaluation leaves for its VJP; what all
    // threads of a pass share. Shared is laid out before the threads start, with `slots` blocks in
    // work at a time; the last argument is the table of wanted gradients, null without VJPs.
    std::default_initializable<typename B::Weights> &&
    std::default_initializable<typename B::Trace> &&
    std::constructible_from<typename B::Shared, const Stage&, const Tiling&, Arena&, int,
                            void* const*> &&
    std::constructible_from<B, const Stage&, const typename B::Shared&, Team> &&
    requires {
      // How many steps a thread may be ahead of another, less one. 0: all meet in every step.
      { B::kAhead } -> std::convertible_to<int>;
      // Whether `vjp` can write a gradient that is one product instead of a sum (Gradient::whole).
      { B::kWritesWhole } -> std::convertible_to<bool>;
    } &&
    requires(B b, const Stage& s, Arena& arena, typename B::Weights& weights,
             typename B::Trace& trace, Matrix<T> m, T* out, const Gradient<T>& gradient,
             Update<T> update, int slot, int k, int64_t n, int64_t rows, int64_t stride, T scale,
             bool vjp, void* statistics, EvaluationSigns signs) {
      // The stage, and how its rows are divided into tiles and threads into crews.
      { b.s } -> std::convertible_to<const Stage&>;
      { B::tiling(s) } -> std::same_as<Tiling>;

      // The shape of the k-th parameter's gradient sum; its data are null.
      { b.shape(k) } -> std::same_as<Matrix<T>>;

      // Buffers: packed weights for a slot, and the trace of a tile of so many rows. `vjp`: whether
      // VJPs will be taken.
      { b.weights(arena, slot, vjp) } -> std::same_as<typename B::Weights>;
      { b.trace_space(arena, rows, vjp) } -> std::same_as<typename B::Trace>;

      // weights ← the parameters of block n of the stage, packed
      b.pack_weights(weights, n);

      // trace ← what f's evaluation at p = m leaves; `vjp`: with what only the VJP needs. `signs`:
      // of relu's arguments, to be kept or known.
      b.trace(weights, m, trace, vjp, signs);
      // update(f(p)) for the tile's rows, after `trace`
      b.output(weights, trace, rows, update);
      // gradient += ∂_θ f(p)ᵀ g, update(∂_x f(p)ᵀ g) with p = m and the cotangent g, after `trace`.
      // An empty update: ∂_x is not needed.
      b.vjp(weights, m, trace, m, gradient, update);

      // Where the batch's statistics in the evaluations to come are written; null: nowhere.
      b.record(statistics);

      // The place of the k-th gradient's sum if several crews share it; null: each has its own.
      { b.shared_sum(slot, k) } -> std::same_as<T*>;
      // out ← scale · Σ over the crews' sums: this thread's share of the k-th gradient, in torch's
      // layout and the storage dtype. `m` is the sum of the thread's own crew, the next crew's lies
      // `stride` numbers further on.
      b.write_gradient(k, out, m, stride, scale);

      // How a crew divides its work: this thread's share of so many things, of a matrix's panels.
      // `meet` waits for the crew's other threads; `leads` is true for one thread of the crew.
      { b.share(n) } -> std::same_as<Share>;
      { b.mine(m) } -> std::same_as<Share>;
      b.meet();
      { b.leads() } -> std::same_as<bool>;
    };

}  // namespace
