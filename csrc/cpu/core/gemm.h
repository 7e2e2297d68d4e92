// Matrix products, fused with the operation that follows them.
//
//     multiply:             C = bias + A B      C[i,j] = bias[j] + Σ_k A[i,k] B[k,j]
//     multiply_transposed:  C = Aᵀ B            C[i,j] = Σ_k A[k,i] B[k,j]
//
// C is never stored by the product itself: it is built in registers, one register tile at a time
// (up to kMaxRows rows of one panel), and handed to an epilogue (epilogues.h). A panel of B stays
// in the first-level cache while the rows of A go by.

#pragma once

#include "matrix.h"

namespace {

template <class T, int Rows>
struct Accumulator {
  Vec<T> v[kPanelVectors * Rows];

  RESODE_INLINE void start(const T* bias) {
#pragma GCC unroll 2
    for (int c = 0; c < kPanelVectors; ++c) {
      const Vec<T> of_row = bias ? load(bias + c * kLanes<T>) : Vec<T>{};
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) v[kPanelVectors * r + c] = of_row;
    }
  }

  // v[r] += a_r · b for the outer product of one k; `a(r)` is the left operand's element.
  template <class A>
  RESODE_INLINE void add(A a, const T* b) {
    Vec<T> right[kPanelVectors];
#pragma GCC unroll 2
    for (int c = 0; c < kPanelVectors; ++c) right[c] = load(b + c * kLanes<T>);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const T s = a(r);
#pragma GCC unroll 2
      for (int c = 0; c < kPanelVectors; ++c) v[kPanelVectors * r + c] += s * right[c];
    }
  }
};

// One register tile of A B: rows i … i + Rows of A, panel j of B. Both operands are padded with
// zeros to whole panels along k, so the inner loop has a fixed length.
template <int Rows, class T, class Epilogue>
RESODE_INLINE void register_tile(Matrix<T> a, Matrix<T> b, const T* bias, int64_t i, int64_t j,
                                 Epilogue epilogue) {
  Accumulator<T, Rows> c;
  c.start(bias ? bias + j * kPanel<T> : nullptr);
  const T* left = a.at(0, i);
  const T* right = b.at(j, 0);
  for (int64_t panel = a.panels(); panel > 0; --panel) {
#pragma GCC unroll 4
    for (int k = 0; k < kPanel<T>; ++k)
      c.add([=](int r) { return left[r * kPanel<T> + k]; }, right + k * kPanel<T>);
    left += a.rows * kPanel<T>;
    right += kPanel<T> * kPanel<T>;
  }
  epilogue((j * a.rows + i) * kPanel<T>, c.v);
}

// One register tile of Aᵀ B: columns i … i + Rows of A, panel j of B.
template <int Rows, class T, class Epilogue>
RESODE_INLINE void register_tile_transposed(Matrix<T> a, Matrix<T> b, int64_t i, int64_t j,
                                            Epilogue epilogue) {
  Accumulator<T, Rows> c;
  c.start(nullptr);
  const T* left[Rows];
  for (int r = 0; r < Rows; ++r) left[r] = a.at((i + r) / kPanel<T>, 0) + (i + r) % kPanel<T>;
  const T* right = b.at(j, 0);
  const int64_t end = a.rows * kPanel<T>;
#pragma GCC unroll 4
  for (int64_t k = 0; k < end; k += kPanel<T>) c.add([&](int r) { return left[r][k]; }, right + k);
  epilogue((j * a.columns + i) * kPanel<T>, c.v);
}

template <int N>
struct Constant {
  static constexpr int value = N;
};

// Calls f(Constant<rows>, i, j) for `count` register tiles of equal height from row i on; returns
// the row after them.
template <int Rows = kMaxRows, class F>
int64_t column_of_register_tiles(int64_t rows, int64_t count, int64_t i, int64_t j, F f) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return column_of_register_tiles<Rows - 1>(rows, count, i, j, f);
  }
  for (; count > 0; --count, i += Rows) f(Constant<Rows>{}, i, j);
  return i;
}

// Covers rows × panels with register tiles of nearly equal height: 16 rows are 6 + 5 + 5.
template <class F>
void for_each_register_tile(int64_t rows, Share panels, F f) {
  const int64_t tiles = ceil_div(rows, kMaxRows);
  const int64_t height = rows / tiles, taller = rows % tiles;
  for (int64_t j = panels.begin; j < panels.end; ++j) {
    int64_t i = 0;
    if (taller) i = column_of_register_tiles(height + 1, taller, i, j, f);
    column_of_register_tiles(height, tiles - taller, i, j, f);
  }
}

// Some of the product's panels.
template <class T, class Epilogue>
void multiply(Matrix<T> a, Matrix<T> b, const typename Matrix<T>::Value* bias, Epilogue epilogue,
              Share panels) {
  for_each_register_tile(a.rows, panels, [=](auto rows, int64_t i, int64_t j) RESODE_ALWAYS {
    register_tile<decltype(rows)::value>(a, b, bias, i, j, epilogue);
  });
}

template <class T, class Epilogue>
void multiply_transposed(Matrix<T> a, Matrix<T> b, Epilogue epilogue, Share panels) {
  for_each_register_tile(a.columns, panels, [=](auto rows, int64_t i, int64_t j) RESODE_ALWAYS {
    register_tile_transposed<decltype(rows)::value>(a, b, i, j, epilogue);
  });
}

}  // namespace
