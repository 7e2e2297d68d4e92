// The arguments of the depth-fused kernels, which fused.cpp launches.

#pragma once

#include "../stage.h"
#include "launch.h"

namespace resode {

constexpr int kWarps = 8;  // of a CTA
constexpr int kThreads = 32 * kWarps;
constexpr int kStateColumns = 32;    // a warp holds 16 rows and so many columns of every state
constexpr int kBlockParameters = 4;  // at most: w1, b1, w2, b2

__host__ __device__ constexpr int round_up(int64_t n, int multiple) {
  return int((n + multiple - 1) / multiple * multiple);
}

// How a CTA sees the stage: `rows` rows of states of `width` columns, in registers, and
// weights `chunk` at a time: hidden units of an MLP, rows of a linear block's weight. All are
// multiples of 16, the width of 32; what is beyond the actual sizes is zero.
struct Tiling {
  int rows, width, chunk;
};

// The layout of shared memory: where each tile begins, in bytes. Rows are 16 bytes longer than
// needed, so that a column is spread over the banks.
struct Layout {
  static __host__ __device__ constexpr int pitch(int columns, int element_bytes) {
    return columns + 16 / element_bytes;  // in elements
  }

  __host__ __device__ constexpr Layout(Block block, Tiling t, int weight_bytes, bool reverse) {
    const int state = t.rows * pitch(t.width, 4) * 4, units = t.rows * pitch(t.chunk, 4) * 4;
    const bool mlp = block == Block::mlp;
    int end = 0;
    const auto take = [&end](int bytes) { return (end += bytes) - bytes; };
    point = take(state);
    cotangent = take(reverse ? state : 0);
    resting = take(reverse ? state : 0);
    value = take(mlp ? units : state);
    slope = take(mlp && reverse ? units : 0);
    weights = end;
    w1 = 0;
    w2 = t.chunk * pitch(t.width, weight_bytes) * weight_bytes;
    b1 = w2 + (mlp ? t.width * pitch(t.chunk, weight_bytes) * weight_bytes : 0);
    buffer = b1 + (mlp ? t.chunk * weight_bytes : 0);
    bytes = end + 2 * buffer;
  }

  int point, cotangent;  // [rows, width]: p and the cotangent there, as operands
  int resting;           // [rows, width]: the state x̃, while the threads work at p
  int value, slope;      // mlp: [rows, chunk], u and dz; linear: value is [rows, width], f(p)
  int weights;           // two buffers of `buffer` bytes, each with
  int buffer;
  int w1, w2, b1;  // [chunk, width], and of an MLP [width, chunk] and [chunk]
  int bytes;       // in all
};

struct Network {
  Activation activation;
  Scheme scheme;
  bool tied;
  int steps;  // N
  float h;
  int64_t rows;
  int dim, hidden;
  const void* parameters[kBlockParameters];  // of block 0
  int64_t strides[kBlockParameters];         // elements from a block's to the next block's
  Tiling tiling;

  __host__ __device__ int block(int n) const { return tied ? 0 : n; }
};

// Makes the steps begin … end − 1 with x as x[begin].
struct Walk {
  const float* x;
  float* y;
  float* anchors;  // [count, rows, dim]: the states x[k], x[2k], … after `begin` and before `end`
  int begin, end, anchor_every;
};

// Partial sums of parameter gradients. Every CTA adds to its own [slots, programs, size];
// block n of the stage has the slot n modulo `slots`.
struct Sums {
  float* at;
  int slots;
  int64_t size;
  int64_t offsets[kBlockParameters];  // −1: not wanted
};

// Makes the steps end − 1 … begin of the reverse pass.
struct ReverseWalk {
  ReverseRule reverse_rule;
  int order;
  const float* start;      // x̃[end]; for the rule `exact` x[states_begin]
  const float* states;     // exact: x[states_begin + 1], …
  const float* anchors;    // x[k], x[2k], …, from which the other rules start again
  const float* cotangent;  // of x[end]
  float* end_state;        // x̃[begin]; null: not wanted
  float* end_cotangent;    // of x[begin]
  float* history;  // [order, rows, dim]: the newest evaluations, φ_n in place n modulo `order`
  int begin, end, states_begin, anchor_every;
  int* nonfinite;  // raised to the n of every point that is not finite; null: not wanted
  Sums sums;
};

// The sums of blocks first, first + 1, … are complete: adds up those of all programs.
struct Reduction {
  Sums sums;
  int programs, first;
  void* gradients[kBlockParameters];   // of block 0, in the storage dtype
  int64_t strides[kBlockParameters];   // elements from a block's to the next block's
  int64_t elements[kBlockParameters];  // of one block's
};

// One precision's kernels.
struct FusedKernels {
  int weight_bytes;
  void (*walk)(const Gpu&, Block, int programs, size_t shared, const Network&, const Walk&);
  void (*reverse)(const Gpu&, Block, int programs, size_t shared, const Network&,
                  const ReverseWalk&);
  void (*reduce)(const Gpu&, int blocks, const Reduction&);
};

}  // namespace resode
