// States and cotangents: [rows, width] float32 numbers, spread over the registers of a CTA.

#pragma once

#include "network.h"
#include "precision.h"

namespace resode {

// A thread's 16 numbers of a state: two tiles side by side, 16 rows and 32 columns for its warp.
struct State {
  Sum of[2];
};

// f(number, other's number) for all of them
template <class F>
__device__ __forceinline__ void each(State& a, const State& b, F f) {
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int i = 0; i < 8; ++i) f(a.of[j].of[i], b.of[j].of[i]);
}
__device__ __forceinline__ State operator+(State a, const State& b) {
  each(a, b, [](float& x, float y) { x += y; });
  return a;
}
__device__ __forceinline__ State operator*(float factor, State a) {
  each(a, a, [=](float& x, float) { x *= factor; });
  return a;
}
// x + a y with one rounding
__device__ __forceinline__ State fma(float a, const State& y, State x) {
  each(x, y, [=](float& x, float y) { x = fmaf(a, y, x); });
  return x;
}

// Which rows of the stage a CTA has, and which numbers of them this thread has.
struct Place {
  int64_t first;  // row of the stage
  int left;       // rows from there on, at most a tile's
  int dim;
  int row, column;  // of the warp's part
  bool active;      // there may be more warps than parts

  __device__ Place(const Network& net, int64_t tile) {
    const int parts = net.tiling.rows / 16, warp = threadIdx.x / 32;
    first = tile * net.tiling.rows;
    left = int(min(net.rows - first, int64_t(net.tiling.rows)));
    dim = net.dim;
    row = warp % parts * 16;
    column = warp / parts * kStateColumns;
    active = column < net.tiling.width;
  }

  // f(row, column, number, number to the right of it) for all of this thread's
  template <class F>
  __device__ __forceinline__ void pairs(State& state, F f) const {
    if (!active) return;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < 8; i += 2)
        f(row + lane_group() + 8 * (i / 2 % 2), column + 16 * j + 8 * (i / 4) + 2 * lane_member(),
          state.of[j].of[i], state.of[j].of[i + 1]);
  }

  // From and to a [rows, dim] matrix in global memory.
  __device__ __forceinline__ State load(const float* from) const {
    State state{};
    const bool aligned = has_pairs(from);
    pairs(state, [&](int r, int c, float& x, float& y) {
      if (r >= left || c >= dim) return;
      const float2 two = load_pair(from + (first + r) * dim + c, aligned, c + 1 < dim);
      x = two.x, y = two.y;
    });
    return state;
  }
  __device__ __forceinline__ void store(float* to, State state) const {
    const bool aligned = has_pairs(to);
    pairs(state, [&](int r, int c, float& x, float& y) {
      if (r < left && c < dim) store_pair(to + (first + r) * dim + c, x, y, aligned, c + 1 < dim);
    });
  }

  // Whether all of this thread's numbers are finite, but for those that only fill the tile.
  __device__ __forceinline__ bool is_finite(State state) const {
    bool all = true;
    pairs(state, [&](int r, int c, float x, float y) {
      if (r < left && c < dim) all &= isfinite(x) && (c + 1 >= dim || isfinite(y));
    });
    return all;
  }

  // From and to a tile in shared memory, which has whole pairs.
  __device__ __forceinline__ State take(Tile<float> tile) const {
    State state{};
    pairs(state, [&](int r, int c, float& x, float& y) {
      if (c >= dim) return;
      const float2 two = *reinterpret_cast<const float2*>(tile(r, c));
      x = two.x, y = two.y;
    });
    return state;
  }
  __device__ __forceinline__ void put(Tile<float> tile, State state) const {
    pairs(state, [&](int r, int c, float& x, float& y) {
      *reinterpret_cast<float2*>(tile(r, c)) = make_float2(x, y);
    });
  }

 private:
  __device__ __forceinline__ bool has_pairs(const float* matrix) const {
    return dim % 2 == 0 && reinterpret_cast<uintptr_t>(matrix) % 8 == 0;
  }
};

}  // namespace resode
