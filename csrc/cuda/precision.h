// Matrix products of 16 × 16 tiles by a warp, in four precisions:
//
//   float32            fused multiply-adds
//   tf32               tensor cores; operands are rounded to 10 bits of mantissa
//   float16, bfloat16  tensor cores; operands are rounded, sums are float32
//
// Operands come from shared memory: tiles of float32 numbers (states, cotangents and what is
// computed from them), and weights as they are stored. For a product of depth k they lie as
//
//   load_a        [row, k]   numbers    with   load_b         [column, k]   weights
//                                       or     load_b_across  [k, column]   weights
//   load_outer_a  [k, row]   numbers    with   load_outer_b   [k, column]   numbers
//
// All layouts, also that of float32, are those of the tensor cores (ptx.h), so that the code around
// a product does not depend on its precision: of a tile's numbers, a lane holds rows g and g + 8 of
// columns 2t, 2t + 1, 2t + 8 and 2t + 9. Rows of shared memory are 16 bytes longer than needed,
// which spreads them over the banks; only tf32's load_b_across meets a bank twice.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "ptx.h"

namespace resode {

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int lane_group() { return lane() / 4; }   // g
__device__ __forceinline__ int lane_member() { return lane() % 4; }  // t

// A 16 × 16 tile of sums, of which a lane has of[i] at row g + 8 (i / 2 % 2) and column
// 8 (i / 4) + 2 t + i % 2: two of the tensor cores' tiles side by side.
struct Sum {
  float of[8];

  __device__ __forceinline__ float (&side(int j))[4] {
    return *reinterpret_cast<float (*)[4]>(of + 4 * j);
  }
};

template <class T>
struct Tile {
  T* at;
  int pitch;  // elements from a row to the next

  __device__ __forceinline__ T* operator()(int row, int column) const {
    return at + row * pitch + column;
  }
};

// Two adjoining numbers, in one access if pairs are aligned. The second may be beyond the end of
// its row.
__device__ __forceinline__ float2 load_pair(const float* at, bool aligned, bool second) {
  if (aligned) return *reinterpret_cast<const float2*>(at);
  return make_float2(at[0], second ? at[1] : 0);
}
__device__ __forceinline__ void store_pair(float* at, float x, float y, bool aligned, bool second) {
  if (aligned) {
    *reinterpret_cast<float2*>(at) = make_float2(x, y);
  } else {
    at[0] = x;
    if (second) at[1] = y;
  }
}

// The row of one of four 8 × 16-byte matrices that this lane names to ldmatrix, the matrices being
// arranged [[0, 2], [1, 3]] or [[0, 1], [2, 3]].
__device__ __forceinline__ int matrix_row(bool down_first) {
  return lane() % 8 + 8 * (down_first ? lane() / 8 % 2 : lane() / 16);
}
__device__ __forceinline__ int matrix_column(bool down_first) {
  return down_first ? lane() / 16 : lane() / 8 % 2;
}

// ----------------------------------------------------------------------------------------- float32

struct Float32 {
  using Weight = float;
  static constexpr int kDepth = 4;
  struct A {
    float of[2][4];  // rows g, g + 8; depth
  };
  struct B {
    float of[4][4];  // columns 2t, 2t + 1, 2t + 8, 2t + 9; depth
  };

  static __device__ __forceinline__ void copy4(float (&to)[4], const float* from) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  }
  static __device__ __forceinline__ A load_a(Tile<float> tile, int row, int k) {
    A a;
    for (int i = 0; i < 2; ++i) copy4(a.of[i], tile(row + lane_group() + 8 * i, k));
    return a;
  }
  static __device__ __forceinline__ A load_outer_a(Tile<float> tile, int row, int k) {
    A a;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int d = 0; d < 4; ++d) a.of[i][d] = *tile(k + d, row + lane_group() + 8 * i);
    return a;
  }
  static __device__ __forceinline__ B load_b(Tile<float> tile, int column, int k) {
    B b;
#pragma unroll
    for (int j = 0; j < 4; ++j)
      copy4(b.of[j], tile(column + 2 * lane_member() + j % 2 + 8 * (j / 2), k));
    return b;
  }
  static __device__ __forceinline__ B load_b_across(Tile<float> tile, int column, int k) {
    B b;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const float2 two =
            *reinterpret_cast<const float2*>(tile(k + d, column + 2 * lane_member() + 8 * j));
        b.of[2 * j][d] = two.x, b.of[2 * j + 1][d] = two.y;
      }
    return b;
  }
  static __device__ __forceinline__ B load_outer_b(Tile<float> tile, int column, int k) {
    return load_b_across(tile, column, k);
  }
  static __device__ __forceinline__ void multiply(Sum& sum, const A& a, const B& b) {
#pragma unroll
    for (int d = 0; d < 4; ++d)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        sum.of[i] = fmaf(a.of[i / 2 % 2][d], b.of[2 * (i / 4) + i % 2][d], sum.of[i]);
  }
};

// -------------------------------------------------------------------------------------------- tf32

struct Tf32 {
  using Weight = float;
  static constexpr int kDepth = 8;
  struct A {
    uint32_t of[4];
  };
  struct B {
    uint32_t of[2][2];
  };

  // The depths k + t and k + t + 4 of the instruction may be any eight of the product's, as long as
  // both operands agree: in an outer product, neighbours avoid bank conflicts.
  static __device__ __forceinline__ int neighbours(int i) { return 2 * lane_member() + i; }
  static __device__ __forceinline__ int in_order(int i) { return lane_member() + 4 * i; }

  static __device__ __forceinline__ A load_a(Tile<float> tile, int row, int k) {
    A a;
    ptx::ldmatrix<false>(a.of, tile(row + matrix_row(true), k + 4 * matrix_column(true)));
#pragma unroll
    for (int i = 0; i < 4; ++i) a.of[i] = ptx::to_tf32(__uint_as_float(a.of[i]));
    return a;
  }
  static __device__ __forceinline__ A load_outer_a(Tile<float> tile, int row, int k) {
    A a;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a.of[i] = ptx::to_tf32(*tile(k + neighbours(i / 2), row + lane_group() + 8 * (i % 2)));
    return a;
  }
  static __device__ __forceinline__ B load_b(Tile<float> tile, int column, int k) {
    uint32_t r[4];
    ptx::ldmatrix<false>(r, tile(column + matrix_row(false), k + 4 * matrix_column(false)));
    B b;
#pragma unroll
    for (int i = 0; i < 4; ++i) b.of[i / 2][i % 2] = ptx::to_tf32(__uint_as_float(r[i]));
    return b;
  }
  static __device__ __forceinline__ B load_b_across(Tile<float> tile, int column, int k) {
    B b;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      b.of[i / 2][i % 2] =
          ptx::to_tf32(*tile(k + in_order(i % 2), column + lane_group() + 8 * (i / 2)));
    return b;
  }
  static __device__ __forceinline__ B load_outer_b(Tile<float> tile, int column, int k) {
    B b;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      b.of[i / 2][i % 2] =
          ptx::to_tf32(*tile(k + neighbours(i % 2), column + lane_group() + 8 * (i / 2)));
    return b;
  }
  static __device__ __forceinline__ void multiply(Sum& sum, const A& a, const B& b) {
    ptx::mma_tf32(sum.side(0), a.of, b.of[0]);
    ptx::mma_tf32(sum.side(1), a.of, b.of[1]);
  }
};

// ------------------------------------------------------------------------------- float16, bfloat16

// Two numbers in one register, rounded.
__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, 4);
  return bits;
}
__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, 4);
  return bits;
}

template <class T>
struct Half {
  using Weight = T;
  static constexpr int kDepth = 16;
  struct A {
    uint32_t of[4];
  };
  struct B {
    uint32_t of[2][2];
  };

  static __device__ __forceinline__ uint32_t pair_across(Tile<float> tile, int k, int column) {
    const int first = k + 2 * lane_member();
    return pack(*tile(first, column), *tile(first + 1, column), T{});
  }
  static __device__ __forceinline__ A load_a(Tile<float> tile, int row, int k) {
    A a;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = *reinterpret_cast<const float2*>(
          tile(row + lane_group() + 8 * (i % 2), k + 2 * lane_member() + 8 * (i / 2)));
      a.of[i] = pack(two.x, two.y, T{});
    }
    return a;
  }
  static __device__ __forceinline__ A load_outer_a(Tile<float> tile, int row, int k) {
    A a;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a.of[i] = pair_across(tile, k + 8 * (i / 2), row + lane_group() + 8 * (i % 2));
    return a;
  }
  template <bool across>
  static __device__ __forceinline__ B load_matrices(const T* row) {
    uint32_t r[4];
    ptx::ldmatrix<across>(r, row);
    return {{{r[0], r[1]}, {r[2], r[3]}}};
  }
  static __device__ __forceinline__ B load_b(Tile<T> tile, int column, int k) {
    return load_matrices<false>(tile(column + matrix_row(false), k + 8 * matrix_column(false)));
  }
  static __device__ __forceinline__ B load_b_across(Tile<T> tile, int column, int k) {
    return load_matrices<true>(tile(k + matrix_row(true), column + 8 * matrix_column(true)));
  }
  static __device__ __forceinline__ B load_outer_b(Tile<float> tile, int column, int k) {
    B b;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      b.of[i / 2][i % 2] = pair_across(tile, k + 8 * (i % 2), column + lane_group() + 8 * (i / 2));
    return b;
  }
  static __device__ __forceinline__ void multiply(Sum& sum, const A& a, const B& b) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if constexpr (std::is_same_v<T, __half>)
        ptx::mma_f16(sum.side(j), a.of, b.of[j]);
      else
        ptx::mma_bf16(sum.side(j), a.of, b.of[j]);
    }
  }
};

}  // namespace resode
