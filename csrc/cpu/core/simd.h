// Vectors of the instruction set that this file is compiled for, through the GCC/Clang vector
// extensions: no intrinsics, so the same lines serve SSE2, AVX2, AVX-512 and NEON.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../../inline.h"

// The kernels are compiled once per instruction set and linked into one module. Everything is kept
// in anonymous namespaces, so that the linker can never hand AVX-512 code to a processor without
// it.
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kMaxRows = 12;  // of a register tile: 24 of 32 registers accumulate
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kMaxRows = 6;  // 12 of 16
#else
constexpr int kVectorBytes = 16;
constexpr int kMaxRows = 6;
#endif

template <class T>
struct Simd;

template <>
struct Simd<float> {
  typedef float Vec __attribute__((vector_size(kVectorBytes)));
  typedef uint32_t Int __attribute__((vector_size(kVectorBytes)));
};

template <>
struct Simd<double> {
  typedef double Vec __attribute__((vector_size(kVectorBytes)));
  typedef uint64_t Int __attribute__((vector_size(kVectorBytes)));
};

template <class T>
using Vec = typename Simd<T>::Vec;

template <class T>
constexpr int kLanes = kVectorBytes / int(sizeof(T));

// Columns of a panel and of a register tile. Two vectors share every load of the left operand; one
// is for stages too narrow to fill two.
#if !defined(RESODE_PANEL_VECTORS)
#define RESODE_PANEL_VECTORS 2
#endif
constexpr int kPanelVectors = RESODE_PANEL_VECTORS;
template <class T>
constexpr int kPanel = kLanes<T> * kPanelVectors;

template <class T>
RESODE_INLINE Vec<T> load(const T* p) {
  Vec<T> v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class T>
RESODE_INLINE void store(T* p, Vec<T> v) {
  memcpy(p, &v, sizeof v);
}

template <class To, class From>
RESODE_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// Two values that go through a formula side by side; a Pair of Pairs is four. Each operation is
// carried out on all of them before the next one, so that one's latency is hidden by the others.
template <class V>
struct Pair {
  V a, b;
  RESODE_INLINE Pair operator-() const { return {-a, -b}; }
};

template <class T>
concept Scalar = std::is_floating_point_v<T>;

#define RESODE_PAIR_OPERATOR(op)                            \
  template <class V>                                        \
  RESODE_INLINE Pair<V> operator op(Pair<V> x, Pair<V> y) { \
    return {x.a op y.a, x.b op y.b};                        \
  }                                                         \
  template <class V, Scalar T>                              \
  RESODE_INLINE Pair<V> operator op(Pair<V> x, T y) {       \
    return {x.a op y, x.b op y};                            \
  }                                                         \
  template <class V, Scalar T>                              \
  RESODE_INLINE Pair<V> operator op(T x, Pair<V> y) {       \
    return {x op y.a, x op y.b};                            \
  }
RESODE_PAIR_OPERATOR(+)
RESODE_PAIR_OPERATOR(-)
RESODE_PAIR_OPERATOR(*)
RESODE_PAIR_OPERATOR(/)
#undef RESODE_PAIR_OPERATOR

// The smaller and the larger of two, lane by lane: y where either is NaN. Compilers make a
// comparison and a blend of the ternary operator, twice the work of the one instruction for it.
// (Masked, because GCC 12 warns of uninitialized values in the plain intrinsics.)
#if defined(__AVX512F__)
constexpr __mmask16 kAllLanes = 0xffff;
#endif
template <class V>
RESODE_INLINE V smaller(V x, V y) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<V, Vec<float>>) return _mm512_maskz_min_ps(kAllLanes, x, y);
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<V, Vec<float>>) return _mm256_min_ps(x, y);
#endif
  return x < y ? x : y;
}
template <class V>
RESODE_INLINE V larger(V x, V y) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<V, Vec<float>>) return _mm512_maskz_max_ps(kAllLanes, x, y);
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<V, Vec<float>>) return _mm256_max_ps(x, y);
#endif
  return x > y ? x : y;
}

// x limited from above, and from both sides to ±limit; a NaN stays a NaN
template <class V, Scalar T>
RESODE_INLINE V at_most(V x, T limit) {
  return smaller(V{} + limit, x);
}
template <class V, Scalar T>
RESODE_INLINE Pair<V> at_most(Pair<V> x, T limit) {
  return {at_most(x.a, limit), at_most(x.b, limit)};
}
template <class V, Scalar T>
RESODE_INLINE V clamp(V x, T limit) {
  return at_most(larger(V{} - limit, x), limit);
}
template <class V, Scalar T>
RESODE_INLINE Pair<V> clamp(Pair<V> x, T limit) {
  return {clamp(x.a, limit), clamp(x.b, limit)};
}

// a where x < y, else b
template <class V, Scalar T>
RESODE_INLINE V where_less(V x, T y, V a, V b) {
  return x < (V{} + y) ? a : b;
}
template <class V, Scalar T>
RESODE_INLINE Pair<V> where_less(Pair<V> x, T y, Pair<V> a, Pair<V> b) {
  return {where_less(x.a, y, a.a, b.a), where_less(x.b, y, a.b, b.b)};
}

// The columns of a panel in one row.
template <class T>
using PanelRow = std::conditional_t<kPanelVectors == 1, Vec<T>, Pair<Vec<T>>>;

template <class V, class T>
RESODE_INLINE V load_all(const T* p) {
  if constexpr (sizeof(V) == kVectorBytes) {
    return load(p);
  } else {
    using Half = decltype(V::a);
    return {load_all<Half>(p), load_all<Half>(p + sizeof(Half) / sizeof(T))};
  }
}

template <class V, class T>
RESODE_INLINE void store_all(T* p, V v) {
  if constexpr (sizeof(V) == kVectorBytes) {
    store(p, v);
  } else {
    store_all(p, v.a);
    store_all(p + sizeof(v.a) / sizeof(T), v.b);
  }
}

// Lane i of x ← lane first(i) of both, lane i of y ← lane second(i): x's lanes count from 0, y's
// from kLanes.
template <class T, class First, class Second, int... Lane>
RESODE_INLINE void shuffle(Vec<T>& x, Vec<T>& y, First first, Second second,
                           std::integer_sequence<int, Lane...>) {
  const Vec<T> a = x, b = y;
#if defined(__clang__)
  x = __builtin_shufflevector(a, b, first(Lane)...);
  y = __builtin_shufflevector(a, b, second(Lane)...);
#else
  using Mask = typename Simd<T>::Int;
  x = __builtin_shuffle(a, b, Mask{first(Lane)...});
  y = __builtin_shuffle(a, b, Mask{second(Lane)...});
#endif
}

// Transposes a square of vectors in log2(lanes) rounds. A round with Distance = 1, 2, 4, … brings
// numbers together that were Distance rows apart. Every shuffle is one x86 instruction: within
// units of 16 bytes it interleaves or swaps halves, between units it takes every other unit.
template <class T, int Distance = 1>
RESODE_INLINE void transpose(Vec<T> (&a)[kLanes<T>]) {
  constexpr int L = kLanes<T>, U = 16 / sizeof(T);
  constexpr auto lanes = std::make_integer_sequence<int, L>{};
  constexpr bool interleaves = Distance == 1 && U == 4;
  if constexpr (Distance < L) {
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) {
      if (i & Distance) continue;
      Vec<T>&x = a[i], &y = a[i + Distance];
      if constexpr (Distance >= U) {
        shuffle<T>(
            x, y, [](int c) { return 2 * (c / U * U) + c % U; },
            [](int c) { return 2 * (c / U * U) + c % U + U; }, lanes);
      } else if constexpr (interleaves) {
        shuffle<T>(
            x, y, [](int c) { return c / U * U + c % U / 2 + c % 2 * L; },
            [](int c) { return c / U * U + c % U / 2 + c % 2 * L + 2; }, lanes);
      } else {
        shuffle<T>(
            x, y, [](int c) { return c & Distance ? L + c - Distance : c; },
            [](int c) { return c & Distance ? L + c : c + Distance; }, lanes);
      }
    }
    transpose<T, 2 * Distance>(a);
  }
  if constexpr (interleaves)  // interleaving has swapped the middle two of every four rows
    for (int i = 0; i < L; i += U) std::swap(a[i + 1], a[i + 2]);
}

}  // namespace
