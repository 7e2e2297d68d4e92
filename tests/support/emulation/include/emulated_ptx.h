// Stands in for the instructions of csrc/cuda/ptx.h.

#pragma once

#include "cuda_runtime.h"

namespace resode::ptx {

using emulation::Place;
using emulation::Product;

inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                    Place place = Place::current()) {
  emulation::mma(Product::f16, d, a, b, place);
}

inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                     Place place = Place::current()) {
  emulation::mma(Product::bf16, d, a, b, place);
}

inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                     Place place = Place::current()) {
  emulation::mma(Product::tf32, d, a, b, place);
}

// Each of the four matrices has 8 rows of 8 numbers; lane 8 i + j gives the address of row j of
// matrix i. Lane l gets the numbers 2 (l % 4) and the next of row l / 4 or, transposed, column.
template <bool transposed>
void ldmatrix(uint32_t (&r)[4], const void* row, Place place = Place::current()) {
  auto rows = emulation::matrix_rows(row, transposed, place);
  int lane = (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
  int column = transposed ? lane / 4 : 2 * (lane % 4);
  for (int i = 0; i < 4; ++i) {
    uint32_t low = rows[2 * i][column];
    uint32_t high = rows[2 * i + 1][transposed ? column : column + 1];
    r[i] = high << 16 | low;
  }
}

// To nearest, ties away from zero.
inline uint32_t to_tf32(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fffffff;  // NaN
  return (bits + 0x1000) & ~0x1fffu;
}

}  // namespace resode::ptx
