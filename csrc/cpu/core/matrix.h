// The one layout that everything inside the kernels has.
//
// A Matrix holds its columns in panels of P = kPanel columns; a panel holds its rows one after the
// other, P numbers each, and the last panel is padded with zeros. So element (i, j) lies at
//
//     data[(⌊j/P⌋ · rows + i) · P + j mod P]
//
// The same layout is the left and the right operand of every product (gemm.h) and its result:
// nothing is packed twice, a register tile is one contiguous run, rows of any length never
// collide in the cache, and no kernel needs a mask.

#pragma once

#include "simd.h"

namespace {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

template <class T>
constexpr int64_t padded(int64_t columns) {
  return ceil_div(columns, kPanel<T>) * kPanel<T>;
}

// A contiguous share of `count` things for one of `parts` workers.
struct Share {
  int64_t begin, end;
  Share(int64_t count, int64_t part, int64_t parts)
      : begin(count * part / parts), end(count * (part + 1) / parts) {}
  static Share all(int64_t count) { return {count, 0, 1}; }
};

template <class T>
struct Matrix {
  using Value = T;
  T* data = nullptr;
  int64_t rows = 0, columns = 0;

  int64_t panels() const { return ceil_div(columns, kPanel<T>); }
  int64_t size() const { return rows * panels() * kPanel<T>; }
  T* at(int64_t panel, int64_t row) const { return data + (panel * rows + row) * kPanel<T>; }

  // Some of the panels.
  Matrix part(Share of) const {
    const int64_t begin = of.begin * kPanel<T>, end = min(of.end * kPanel<T>, columns);
    return {at(of.begin, 0), rows, end - begin};
  }
};

template <class T>
RESODE_INLINE Vec<T> load_some(const T* p, int64_t count) {
  if (count >= kLanes<T>) return load(p);
  Vec<T> v{};
  for (int i = 0; i < count; ++i) v[i] = p[i];
  return v;
}

template <class T>
RESODE_INLINE void store_some(T* p, int64_t count, Vec<T> v) {
  if (count >= kLanes<T>) return store(p, v);
  for (int i = 0; i < count; ++i) p[i] = v[i];
}

// Whether all of m's numbers are finite. x · 0 is 0 if x is finite and NaN otherwise, and a sum
// with a NaN in it is NaN.
template <class T>
bool is_finite(Matrix<T> m) {
  Vec<T> sums[kPanelVectors] = {};  // side by side, to hide some of the latency of a sum
  for (int64_t i = 0; i < m.size(); i += kPanel<T>)
    for (int c = 0; c < kPanelVectors; ++c) sums[c] += load(m.data + i + c * kLanes<T>) * T(0);
  for (int c = 0; c < kPanelVectors; ++c)
    for (int k = 0; k < kLanes<T>; ++k)
      if (sums[c][k] != 0) return false;
  return true;
}

// m ← rows of a row-major array, m.columns apart.
template <class T>
void from_rows(Matrix<T> m, const T* rows) {
  for (int64_t j = 0; j < m.panels(); ++j)
    for (int64_t i = 0; i < m.rows; ++i)
      for (int c = 0; c < kPanel<T>; c += kLanes<T>) {
        const int64_t column = j * kPanel<T> + c;
        store(m.at(j, i) + c, load_some(rows + i * m.columns + column, m.columns - column));
      }
}

// rows ← m. Given a spare buffer of m's size, the rows may be m's own memory.
template <class T>
void to_rows(T* rows, Matrix<T> m, T* spare = nullptr) {
  if (spare) {
    memcpy(spare, m.data, m.size() * sizeof(T));
    m.data = spare;
  }
  for (int64_t j = 0; j < m.panels(); ++j)
    for (int64_t i = 0; i < m.rows; ++i)
      for (int c = 0; c < kPanel<T>; c += kLanes<T>) {
        const int64_t column = j * kPanel<T> + c;
        store_some(rows + i * m.columns + column, m.columns - column, load(m.at(j, i) + c));
      }
}

}  // namespace
