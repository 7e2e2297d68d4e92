// Remembered kinks: the forward pass keeps the sign of every argument u of relu, one bit each, and
// in the reverse pass relu(u) is m u, m the kept sign (resode_kernels/kinks.py).

#pragma once

#include <type_traits>

#include "elementary.h"
#include "matrix.h"

namespace {

// Bit i: whether lane i is positive.
template <class T>
RESODE_INLINE uint32_t positive_lanes(Vec<T> v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    return _mm512_cmp_ps_mask(v, Vec<T>{}, _CMP_GT_OQ);
  else
    return _mm512_cmp_pd_mask(v, Vec<T>{}, _CMP_GT_OQ);
#elif defined(__AVX2__)
  const Vec<T> mask = bit_cast<Vec<T>>(v > Vec<T>{});
  if constexpr (sizeof(T) == 4)
    return uint32_t(_mm256_movemask_ps(mask));
  else
    return uint32_t(_mm256_movemask_pd(mask));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes<T>; ++i) bits |= uint32_t(v[i] > 0) << i;
  return bits;
#endif
}

// v in the lanes whose bits are set, 0 in the others.
template <class T>
RESODE_INLINE Vec<T> where_set(uint32_t bits, Vec<T> v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    return _mm512_maskz_mov_ps(__mmask16(bits), v);
  else
    return _mm512_maskz_mov_pd(__mmask8(bits), v);
#else
  using Int = typename Simd<T>::Int;
  Int lane;
  for (int i = 0; i < kLanes<T>; ++i) lane[i] = 1u << i;
  const auto set = ((Int{} + bits) & lane) != 0;
  return bit_cast<Vec<T>>(bit_cast<Int>(v) & bit_cast<Int>(set));
#endif
}

inline int64_t sign_bytes(int64_t columns) { return ceil_div(columns, 8); }

// The signs of a matrix of arguments, row by row: bit j of byte b is that of column 8 b + j.
struct Signs {
  uint8_t* data = nullptr;  // null: none are kept
  int64_t bytes = 0;        // of a row
  bool known = false;       // this is the reverse pass

  // value ← relu(u) and slope ← relu'(u) for a panel of a row, by the signs, or as usual if they
  // are kept now.
  template <class T>
  RESODE_INLINE void apply(PanelRow<T> u, int64_t row, int64_t panel, PanelRow<T>& value,
                           PanelRow<T>& slope) const {
    if (!known) {
      put<T>(row, panel, positive<T>(u));
      return resode::Relu::template apply<Math<T>>(u, value, slope);
    }
    const uint32_t bits = get<T>(row, panel);
    value = set<T>(bits, u);
    slope = set<T>(bits, u * T(0) + T(1));
  }

  // Keeps the signs of a matrix, of which `u` may be the relu: some octets of columns.
  template <class T>
  void keep(Matrix<T> u, Share octets) const {
    constexpr int kOctets = max(1, kPanel<T> / 8);  // in a panel, or a part of one
    for (int64_t j = 0; j < u.panels(); ++j) {
      const int64_t octet = j * kPanel<T> / 8;
      if (octet + kOctets <= octets.begin || octet >= octets.end) continue;
      for (int64_t r = 0; r < u.rows; ++r)
        put<T>(r, j, positive<T>(load_all<PanelRow<T>>(u.at(j, r))), octets.begin, octets.end);
    }
  }

 private:
  template <class T>
  static RESODE_INLINE uint32_t positive(PanelRow<T> u) {
    if constexpr (kPanelVectors == 1)
      return positive_lanes<T>(u);
    else
      return positive_lanes<T>(u.a) | positive_lanes<T>(u.b) << kLanes<T>;
  }
  template <class T>
  static RESODE_INLINE PanelRow<T> set(uint32_t bits, PanelRow<T> v) {
    if constexpr (kPanelVectors == 1)
      return where_set<T>(bits, v);
    else
      return {where_set<T>(bits, v.a), where_set<T>(bits >> kLanes<T>, v.b)};
  }

  // The bits of a panel, into the bytes from `begin` to `end` of a row. A byte that two panels
  // share is begun by the first.
  template <class T>
  RESODE_INLINE void put(int64_t row, int64_t panel, uint32_t bits, int64_t begin = 0,
                         int64_t end = 1 << 30) const {
    uint8_t* const to = data + row * bytes;
    const int64_t column = panel * kPanel<T>;
    if constexpr (kPanel<T> < 8) {
      uint8_t& byte = to[column / 8];
      byte = uint8_t(column % 8 ? byte | bits << column % 8 : bits);
    } else {
      const int64_t first = column / 8;
      if (first >= begin && first + kPanel<T> / 8 <= min(bytes, end)) {
        memcpy(to + first, &bits, kPanel<T> / 8);
      } else {
        for (int64_t b = max(first, begin); b < min(first + kPanel<T> / 8, min(bytes, end)); ++b)
          to[b] = uint8_t(bits >> 8 * (b - first));
      }
    }
  }
  template <class T>
  RESODE_INLINE uint32_t get(int64_t row, int64_t panel) const {
    const uint8_t* const from = data + row * bytes;
    const int64_t column = panel * kPanel<T>, first = column / 8;
    if constexpr (kPanel<T> < 8) return uint32_t(from[first]) >> column % 8;
    uint32_t bits = 0;
    if (first + kPanel<T> / 8 <= bytes)
      memcpy(&bits, from + first, kPanel<T> / 8);
    else
      for (int64_t b = first; b < bytes; ++b) bits |= uint32_t(from[b]) << 8 * (b - first);
    return bits;
  }
};

// The signs of one evaluation, from the first row of a tile on.
struct EvaluationSigns {
  uint8_t* data = nullptr;  // of all rows
  int64_t first_row = 0;
  bool known = false;

  // Of an argument of so many columns, behind `before` bytes of others.
  Signs of(int64_t columns, int64_t before = 0) const {
    const int64_t bytes = sign_bytes(columns);
    return {data ? data + before + first_row * bytes : nullptr, bytes, known};
  }
};

}  // namespace
