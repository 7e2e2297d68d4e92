// What one thread works with: the packed weights and gradient sums of the blocks in work, and
// buffers for a tile.
//
// Blocks live in slots: Heun's neighbours in two, a tied stage's only block in one. Gradient sums
// have Block::kAhead slots more, so that a thread can go on while others are still at the step
// before (worker.h).

#pragma once

#include "../blocks/block.h"

namespace {

template <class T, ResidualBlock<T> Block>
struct BlockRunner {
  Block block;
  void* const* results;  // the table of the gradients that are wanted
  int slots;
  bool tied;
  bool whole;                // a gradient of more than one row is one product, and needs no sum
  T step;                    // h
  uint8_t* signs = nullptr;  // of relu's arguments, in all evaluations; null: none
  bool signs_known = false;  // in the reverse pass
  int64_t first_row = 0;     // of the tile in work
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
  // u(f_n(p)) in evaluation k, or in a repetition of it.
  void evaluate(int64_t n, int64_t k, Matrix<T> p, Update<T> u) {
    trace(n, k, p, traces[0], false);
    output(n, p, traces[0], u);
  }
  void trace(int64_t n, int64_t k, Matrix<T> p, typename Block::Trace& t, bool vjp = true) {
    EvaluationSigns of_evaluation;
    if (signs) {
      const Stage& s = block.s;
      of_evaluation = {signs + k * s.rows * s.sign_bytes(), first_row, signs_known};
    }
    block.trace(weights[slot(n)], p, t, vjp, of_evaluation);
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

}  // namespace
