// The way in and out for parameters: from the dtype that torch stores them in to packed matrices of
// the stream's dtype, and from per-thread gradient sums back. A float16 or bfloat16 parameter is
// widened here, one block at a time; no float32 copy of a whole stage's parameters is ever made.

#pragma once

#include "../../stage.h"
#include "matrix.h"

namespace {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

RESODE_INLINE float widen(float x) { return x; }
RESODE_INLINE double widen(double x) { return x; }
RESODE_INLINE float widen(BFloat16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }
RESODE_INLINE float widen(Float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = uint32_t(x.bits & 0x7fff) << 13;
  if (rest >= 0x0f800000) return bit_cast<float>(sign | rest | 0x7f800000);  // infinity, NaN
  return bit_cast<float>(sign | bit_cast<uint32_t>(bit_cast<float>(rest) * 0x1p112f));
}

// To the nearest, ties to even.
RESODE_INLINE void narrow(float x, float& y) { y = x; }
RESODE_INLINE void narrow(double x, double& y) { y = x; }
RESODE_INLINE void narrow(float x, BFloat16& y) {
  const uint32_t u = bit_cast<uint32_t>(x);
  y.bits = x != x ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
RESODE_INLINE void narrow(float x, Float16& y) {
  const uint32_t u = bit_cast<uint32_t>(x), sign = u & 0x80000000;
  const float magnitude = bit_cast<float>(u ^ sign);
  uint32_t rest;
  if (!(magnitude < 65520.0f)) {
    rest = x != x ? 0x7e00 : 0x7c00;
  } else if (magnitude < 0x1p-14f) {  // subnormal: adding 1/2 leaves the rounded multiple of 2^-24
    rest = bit_cast<uint32_t>(magnitude + 0.5f) - bit_cast<uint32_t>(0.5f);
  } else {
    const uint32_t rebased = (u ^ sign) - (112u << 23);
    rest = (rebased + 0xfff + ((rebased >> 13) & 1)) >> 13;
  }
  y.bits = uint16_t(sign >> 16 | rest);
}

template <class T, class S>
RESODE_INLINE Vec<T> load_widened(const S* p, int64_t count) {
  if constexpr (sizeof(S) == sizeof(T)) {
    return load_some(p, count);
  } else {
    T values[kLanes<T>] = {};
    for (int i = 0; i < min(count, kLanes<T>); ++i) values[i] = widen(p[i]);
    return load(values);
  }
}

template <class T, class S>
RESODE_INLINE void store_narrowed(S* p, int64_t count, Vec<T> v) {
  if constexpr (sizeof(S) == sizeof(T)) {
    store_some(p, count, v);
  } else {
    for (int i = 0; i < min(count, kLanes<T>); ++i) narrow(v[i], p[i]);
  }
}

// Calls f with a value of the C++ type that stores `dtype`. A float64 stream has float64
// parameters, a float32 stream any of the others.
template <class T, class F>
void with_storage(resode::DType dtype, F f) {
  if constexpr (sizeof(T) == sizeof(double)) {
    f(double{});
  } else {
    if (dtype == resode::DType::float16) return f(Float16{});
    if (dtype == resode::DType::bfloat16) return f(BFloat16{});
    f(float{});
  }
}

// Whether parameters of this dtype are stored as the stream's numbers are.
template <class T>
bool is_stored_as(resode::DType dtype) {
  return dtype == (sizeof(T) == sizeof(double) ? resode::DType::float64 : resode::DType::float32);
}

// b[k, n] ← w[k, n] for some panels of b; rows beyond w's are zero.
template <class T, class S>
void pack(Matrix<T> b, const S* w, int64_t w_rows, Share panels) {
  for (int64_t j = panels.begin; j < panels.end; ++j)
    for (int64_t k = 0; k < b.rows; ++k)
      for (int c = 0; c < kPanel<T>; c += kLanes<T>) {
        const int64_t column = j * kPanel<T> + c;
        const int64_t count = k < w_rows ? b.columns - column : 0;
        store(b.at(j, k) + c, load_widened<T>(w + k * b.columns + column, count));
      }
}

// square ← `rows` rows of `columns` numbers, `pitch` apart, and zeros beyond them. Not inlined: its
// variables would take registers from the code for whole squares.
template <class T, class S>
__attribute__((noinline)) void load_corner(const S* from, int64_t rows, int64_t columns,
                                           int64_t pitch, Vec<T> (&square)[kLanes<T>]) {
  for (int64_t i = 0; i < kLanes<T>; ++i)
    square[i] = load_widened<T>(from + i * pitch, i < rows ? columns : 0);
}

// b[k, n] ← w[n, k], likewise; w has w_columns columns.
template <class T, class S>
void pack_transposed(Matrix<T> b, const S* w, int64_t w_columns, Share panels) {
  for (int64_t j = panels.begin; j < panels.end; ++j)
    for (int c = 0; c < kPanel<T>; c += kLanes<T>)
      for (int64_t k = 0; k < b.rows; k += kLanes<T>) {
        const int64_t n = j * kPanel<T> + c;
        const S* const from = w + n * w_columns + k;
        Vec<T> square[kLanes<T>];
        if (n + kLanes<T> <= b.columns && k + kLanes<T> <= w_columns) {
#pragma GCC unroll 16
          for (int i = 0; i < kLanes<T>; ++i)
            square[i] = load_widened<T>(from + i * w_columns, kLanes<T>);
        } else {
          load_corner<T>(from, b.columns - n, w_columns - k, w_columns, square);
        }
        transpose<T>(square);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes<T>; ++i) store(b.at(j, k + i) + c, square[i]);
      }
}

// out ← scale · Σ_t sums[t], in the order of t, for some rows and panels; `out` is row-major and
// sums[t] lies at sum.data + t · stride.
template <class T, class S>
void reduce(S* out, Matrix<T> sum, int64_t stride, int sums, T scale, Share rows, Share panels) {
  for (int64_t i = rows.begin; i < rows.end; ++i)
    for (int64_t j = panels.begin; j < panels.end; ++j)
      for (int c = 0; c < kPanel<T>; c += kLanes<T>) {
        const int64_t column = j * kPanel<T> + c;
        const T* p = sum.at(j, i) + c;
        Vec<T> v = load(p);
        for (int t = 1; t < sums; ++t) v += load(p + t * stride);
        store_narrowed<T>(out + i * sum.columns + column, sum.columns - column, scale * v);
      }
}

}  // namespace
