// Products of tiles in shared memory, added to 16 × 16 sums in a warp's registers: `sums` are N of
// them side by side, their first rows and columns are given.

#pragma once

#include "network.h"
#include "precision.h"

namespace resode {

// sums += a bᵀ
template <class P, int N>
__device__ __forceinline__ void add_product(Sum (&sums)[N], Tile<float> a, int row,
                                            Tile<typename P::Weight> b, int column, int depth) {
#pragma unroll 2
  for (int k = 0; k < depth; k += P::kDepth) {
    const auto left = P::load_a(a, row, k);
#pragma unroll
    for (int i = 0; i < N; ++i) P::multiply(sums[i], left, P::load_b(b, column + 16 * i, k));
  }
}

// sums += a b
template <class P, int N>
__device__ __forceinline__ void add_product_across(Sum (&sums)[N], Tile<float> a, int row,
                                                   Tile<typename P::Weight> b, int column,
                                                   int depth) {
#pragma unroll 2
  for (int k = 0; k < depth; k += P::kDepth) {
    const auto left = P::load_a(a, row, k);
#pragma unroll
    for (int i = 0; i < N; ++i) P::multiply(sums[i], left, P::load_b_across(b, column + 16 * i, k));
  }
}

// sum += aᵀ b
template <class P>
__device__ __forceinline__ void add_outer_product(Sum& sum, Tile<float> a, int row, Tile<float> b,
                                                  int column, int depth) {
#pragma unroll(16 / P::kDepth)
  for (int k = 0; k < depth; k += P::kDepth)
    P::multiply(sum, P::load_outer_a(a, row, k), P::load_outer_b(b, column, k));
}

// f(row, column, i) for this lane's pairs of numbers of a sum, of[i] and of[i + 1] to its right
template <class F>
__device__ __forceinline__ void each_pair(F f) {
#pragma unroll
  for (int i = 0; i < 8; i += 2)
    f(lane_group() + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * lane_member(), i);
}

// f(row, column) for the 16 × 16 tiles of a [rows, columns] matrix that are this warp's
template <class F>
__device__ __forceinline__ void each_tile(int rows, int columns, F f) {
  const int down = rows / 16;
  for (int i = threadIdx.x / 32; i < down * (columns / 16); i += kWarps)
    f(i % down * 16, i / down * 16);
}

}  // namespace resode
