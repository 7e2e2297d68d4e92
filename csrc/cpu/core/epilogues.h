// Operations on the result of a product while it is still in registers. An epilogue is called with
// N consecutive vectors of the result and their offset in any matrix of the result's shape.

#pragma once

#include "../../stage.h"
#include "elementary.h"
#include "matrix.h"

namespace {

// f(offset, vector) for each of the vectors
template <class T, int N, class F>
RESODE_INLINE void for_each_of(int64_t offset, const Vec<T> (&v)[N], F f) {
#pragma GCC unroll 32
  for (int i = 0; i < N; ++i) f(offset + i * kLanes<T>, v[i]);
}

// Calls f with the activation's struct.
template <class F>
void with_activation(resode::Activation activation, F f) {
  switch (activation) {
#define RESODE_CASE(name, Struct) \
  case resode::Activation::name:  \
    return f(resode::Struct{});
    RESODE_ACTIVATIONS(RESODE_CASE)
#undef RESODE_CASE
    case resode::Activation::identity:
      return;  // no block applies it
  }
}

// hidden ← σ(z), and where a VJP follows slope ← σ'(z)
template <class T, class Act>
struct Activate {
  T* hidden;
  T* slope;  // may be null

  template <int N>
  RESODE_INLINE void operator()(int64_t offset, const Vec<T> (&z)[N]) const {
    // Through memory, so that the formula has all registers to itself.
    for_each_of<T>(offset, z, [&](int64_t at, Vec<T> x) { store(hidden + at, x); });
    using Two = std::conditional_t<N % 2 == 0, Pair<Vec<T>>, Vec<T>>;
    using V = std::conditional_t<N % 4 == 0, Pair<Two>, Two>;
    constexpr int64_t kStride = sizeof(V) / sizeof(T);
#pragma GCC unroll 1
    for (int64_t at = offset; at < offset + N * kLanes<T>; at += kStride) {
      V value, derivative;
      Act::template apply<Math<T>>(load_all<V>(hidden + at), value, derivative);
      store_all(hidden + at, value);
      if (slope) store_all(slope + at, derivative);
    }
  }
};

// slope ← v ⊙ slope: turns σ'(z) and ∂L/∂σ into ∂L/∂z
template <class T>
struct TimesSlope {
  T* slope;

  template <int N>
  RESODE_INLINE void operator()(int64_t offset, const Vec<T> (&v)[N]) const {
    for_each_of<T>(offset, v,
                   [&](int64_t at, Vec<T> x) { store(slope + at, load(slope + at) * x); });
  }
};

// sum ← v the first time, sum + v afterwards
template <class T>
struct Accumulate {
  T* sum;
  bool fresh;

  template <int N>
  RESODE_INLINE void operator()(int64_t offset, const Vec<T> (&v)[N]) const {
    if (fresh) {
      for_each_of<T>(offset, v, [&](int64_t at, Vec<T> x) { store(sum + at, x); });
    } else {
      for_each_of<T>(offset, v, [&](int64_t at, Vec<T> x) { store(sum + at, load(sum + at) + x); });
    }
  }
};

// out ← scale · v, where out is row-major: a product that is a parameter's whole gradient
template <class T>
struct WriteRows {
  T* out;
  int64_t rows, columns;
  T scale;

  template <int N>
  RESODE_INLINE void operator()(int64_t offset, const Vec<T> (&v)[N]) const {
    const int64_t panel = offset / kPanel<T> / rows, row = offset / kPanel<T> % rows;
    const int64_t column = panel * kPanel<T>;
    T* const first = out + row * columns + column;
#pragma GCC unroll 32
    for (int i = 0; i < N; ++i) {
      const int64_t c = i % kPanelVectors * kLanes<T>;
      store_some(first + i / kPanelVectors * columns + c, columns - column - c, scale * v[i]);
    }
  }
};

// Every linear update of the residual stream and the cotangent. With v the product, or the mean of
// the product and `other`:
//
//     out ← base + scale · v          for up to two lines; base may be null (zero), or out itself
template <class T>
struct Update {
  struct Line {
    T* out = nullptr;
    const T* base = nullptr;
    T scale = 1;
  };
  Line first{}, second{};
  const T* other = nullptr;

  bool empty() const { return !first.out && !second.out; }

  template <int N>
  RESODE_INLINE void operator()(int64_t offset, const Vec<T> (&product)[N]) const {
    if (!other) return apply(offset, product);
    Vec<T> mean[N];
    for_each_of<T>(0, product, [&](int64_t at, Vec<T> x) {
      mean[at / kLanes<T>] = (load(other + offset + at) + x) * T(0.5);
    });
    apply(offset, mean);
  }

 private:
  template <int N>
  RESODE_INLINE void apply(int64_t offset, const Vec<T> (&v)[N]) const {
    apply(first, offset, v);
    apply(second, offset, v);
  }

  template <int N>
  static RESODE_INLINE void apply(const Line& line, int64_t offset, const Vec<T> (&v)[N]) {
    if (!line.out) return;
    if (line.base) {
      for_each_of<T>(offset, v, [&](int64_t at, Vec<T> x) {
        store(line.out + at, line.scale * x + load(line.base + at));
      });
    } else {
      for_each_of<T>(offset, v,
                     [&](int64_t at, Vec<T> x) { store(line.out + at, line.scale * x); });
    }
  }
};

// An update of one row of a panel.
template <class T>
RESODE_INLINE void apply(const Update<T>& update, int64_t offset, PanelRow<T> row) {
  Vec<T> v[kPanelVectors];
  memcpy(v, &row, sizeof v);
  update(offset, v);
}

// Hands values that were computed earlier, those from offset `begin` to `end`, to an epilogue.
template <class T, class Epilogue>
void for_each_vector(const T* values, int64_t begin, int64_t end, Epilogue epilogue) {
  for (int64_t i = begin; i < end; i += kLanes<T>) {
    const Vec<T> v[1] = {load(values + i)};
    epilogue(i, v);
  }
}

}  // namespace
