// What the blocks that work row by row share: crews of threads, gradient sums, their reduction.

#pragma once

#include "../core/gemm.h"
#include "../core/storage.h"
#include "block.h"

namespace {

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

  // The thread's share of what the crew divides, and of the panels of a matrix.
  Share share(int64_t count) const { return crew.share(count); }
  Share mine(Matrix<T> m) const { return share(m.panels()); }
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

}  // namespace
