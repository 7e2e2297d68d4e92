// Partial sums of parameter gradients, each CTA's own: added to without atomics, in the order in
// which the CTA makes its steps.

#pragma once

#include "network.h"
#include "products.h"

namespace resode {

// The sums of one residual block of the stage.
struct Gradients {
  float* at;  // this program's
  const Sums& sums;
  bool fresh;  // nothing summed yet

  __device__ Gradients(const Sums& sums, int block, bool fresh)
      : at(sums.at + (int64_t(block % sums.slots) * gridDim.x + blockIdx.x) * sums.size),
        sums(sums),
        fresh(fresh) {}

  __device__ __forceinline__ bool wanted(int k) const { return sums.offsets[k] >= 0; }

  // For parameter k, a [rows, columns] matrix: adds factor · aᵀ b, of 16 columns of a and of b over
  // `depth` rows, to the 16 × 16 sums from (row, column) on. Nothing is added beyond the matrix.
  template <class P>
  __device__ __forceinline__ void add_outer(int k, float factor, Tile<float> a, int a_column,
                                            Tile<float> b, int b_column, int depth, int row,
                                            int column, int rows, int columns) const {
    const bool aligned = columns % 2 == 0;
    float* const to = at + sums.offsets[k] + int64_t(row) * columns + column;
    const auto inside = [&](int r, int c) { return row + r < rows && column + c < columns; };
    Sum before{};
    if (!fresh)
      each_pair([&](int r, int c, int i) {
        if (!inside(r, c)) return;
        const float2 two = load_pair(to + r * columns + c, aligned, inside(r, c + 1));
        before.of[i] = two.x, before.of[i + 1] = two.y;
      });
    Sum sum{};
    add_outer_product<P>(sum, a, a_column, b, b_column, depth);
    each_pair([&](int r, int c, int i) {
      if (inside(r, c))
        store_pair(to + r * columns + c, fmaf(factor, sum.of[i], before.of[i]),
                   fmaf(factor, sum.of[i + 1], before.of[i + 1]), aligned, inside(r, c + 1));
    });
  }

  // For parameter k, a vector: adds factor · the column sums of a tile to its elements first …
  // first + count − 1.
  __device__ __forceinline__ void add_columns(int k, float factor, Tile<float> tile, int rows,
                                              int first, int count) const {
    for (int c = threadIdx.x; c < count; c += kThreads) {
      float sum = 0;
#pragma unroll 8
      for (int r = 0; r < rows; ++r) sum += *tile(r, c);
      float* const to = at + sums.offsets[k] + first + c;
      *to = fmaf(factor, sum, fresh ? 0 : *to);
    }
  }
};

}  // namespace resode
