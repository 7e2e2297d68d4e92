// Recorded increments: rounding to a few bits. resode_kernels/recording.py is the specification.
//
// A row of a state is cut into groups of 32 elements, the last of which may be shorter. An
// increment v is rounded group by group, in b bits an element:
//
//     w = R v,   s = max |w| rounded up to bfloat16,   u = c s,   q = round(w/u − shift),
//     Q(v) = R (q + shift) u
//
// R rotates every four elements that lie 8 apart by the Hadamard matrix H/2; shorter groups are not
// rotated. Codes are packed by octets of elements, those of an octet in b bytes. A group is a few
// vectors in registers from the state to its codes, so a pass over a tile is all that it takes.

#pragma once

#include <limits>
#include <type_traits>

#include "codes.h"

namespace {

inline int64_t groups_of(int64_t row) { return ceil_div(row, kGroup); }
inline int64_t code_bytes(int64_t row, int bits) { return ceil_div(row, kOctet) * bits; }

// Calls f(std::integral_constant<int, bits>).
template <class F>
void with_bits(int bits, F f) {
  switch (bits) {
#define RESODE_CASE(b) \
  case b:              \
    return f(std::integral_constant<int, b>{});
    RESODE_CASE(2)
    RESODE_CASE(3)
    RESODE_CASE(4)
    RESODE_CASE(5)
    RESODE_CASE(6)
    RESODE_CASE(8)
    RESODE_CASE(12)
    RESODE_CASE(16)
#undef RESODE_CASE
  }
}

// The levels (q + shift) · c · s, with q from `low` on: 2^b − 1 of them, or with 2 bits all four.
template <int Bits>
struct Levels {
  static constexpr int kLow = Bits == 2 ? -2 : 1 - (1 << (Bits - 1));
  static constexpr double kShift = Bits == 2 ? 0.5 : 0, kC = Bits == 2 ? 0.4 : -1.0 / kLow;
};

// ---------------------------------------------------------------------------- groups in registers

template <class T>
struct Group {
  Vec<T> v[kGroupVectors<T>];
};

// The other half of a vector in each half.
template <class T>
RESODE_INLINE Vec<T> swap_halves(Vec<T> v) {
  Vec<T> other = v;
  shuffle<T>(
      v, other, [](int i) { return (i + kLanes<T> / 2) % kLanes<T>; }, [](int i) { return i; },
      std::make_integer_sequence<int, kLanes<T>>{});
  return v;
}

template <class T>
RESODE_INLINE void rotate(Group<T>& g) {
  constexpr int W = kOctet / kLanes<T>;  // vectors of an octet
  if constexpr (W > 0) {
#pragma GCC unroll 4
    for (int i = 0; i < W; ++i) {
      Vec<T>&a = g.v[i], &b = g.v[i + W], &c = g.v[i + 2 * W], &d = g.v[i + 3 * W];
      const Vec<T> p = a + b, q = a - b, r = c + d, s = c - d;
      a = T(0.5) * (p + r);
      b = T(0.5) * (q + s);
      c = T(0.5) * (p - r);
      d = T(0.5) * (q - s);
    }
  } else {  // two octets in a vector
    static_assert(kLanes<T> == 2 * kOctet || kLanes<T> <= kOctet);
    Vec<T> sign;
    for (int i = 0; i < kLanes<T>; ++i) sign[i] = i < kOctet ? T(1) : T(-1);
    const Vec<T> x = sign * g.v[0] + swap_halves<T>(g.v[0]);
    const Vec<T> y = sign * g.v[1] + swap_halves<T>(g.v[1]);
    g.v[0] = T(0.5) * (x + y);
    g.v[1] = T(0.5) * (x - y);
  }
}

// The larger of two, lane by lane. For a ternary operator compilers make two instructions.
template <class V>
RESODE_INLINE V larger_lanes(V x, V y) {
#if defined(__AVX512F__)
  if constexpr (sizeof(x[0]) == 4)
    return V(_mm512_maskz_max_epi32(kAllLanes, __m512i(x), __m512i(y)));
  else
    return V(_mm512_maskz_max_epi64(__mmask8(kAllLanes), __m512i(x), __m512i(y)));
#elif defined(__AVX2__)
  if constexpr (sizeof(x[0]) == 4) return V(_mm256_max_epi32(__m256i(x), __m256i(y)));
#endif
  return x > y ? x : y;
}

// most ← the largest of all lanes, in every lane
template <class T, int Distance = kLanes<T> / 2>
RESODE_INLINE void spread_largest(typename SignedOf<T>::Vec& most) {
  if constexpr (Distance > 0) {
    Vec<T> moved = bit_cast<Vec<T>>(most), same = moved;
    shuffle<T>(
        moved, same, [](int i) { return i ^ Distance; }, [](int i) { return i; },
        std::make_integer_sequence<int, kLanes<T>>{});
    most = larger_lanes(most, bit_cast<typename SignedOf<T>::Vec>(moved));
    spread_largest<T, Distance / 2>(most);
  }
}

// The largest magnitude. Magnitudes are compared as integers, in which order a NaN is the largest.
template <class T>
RESODE_INLINE T largest(const Group<T>& g) {
  using V = typename SignedOf<T>::Vec;
  constexpr auto kMagnitude = std::numeric_limits<typename SignedOf<T>::Lane>::max();
  V most = bit_cast<V>(g.v[0]) & kMagnitude;
#pragma GCC unroll 16
  for (int i = 1; i < kGroupVectors<T>; ++i)
    most = larger_lanes(most, bit_cast<V>(g.v[i]) & kMagnitude);
  spread_largest<T>(most);
  return bit_cast<Vec<T>>(most)[0];
}

// To bfloat16, upwards; below 2^−100 to zero.
RESODE_INLINE uint16_t round_up(float largest) {
  uint32_t bits = bit_cast<uint32_t>(largest);
  if (bits < 0x0d800000) return 0;  // 2^−100
  if (bits > 0x7f800000) bits = 0x7fc00000;
  return uint16_t((bits + 0xffff) >> 16);
}
RESODE_INLINE uint16_t round_up(double largest) {
  const float single = float(largest);
  return round_up(double(single) < largest ? bit_cast<float>(bit_cast<uint32_t>(single) + 1)
                                           : single);
}
RESODE_INLINE float scale_from(uint16_t bfloat16) {
  return bit_cast<float>(uint32_t(bfloat16) << 16);
}

// ---------------------------------------------------------------------------------- whole groups

// Rounds v: the codes to `codes`, the scale to `scale`; v becomes Q(v). `whole`: it is a group
// of 32.
template <int Bits, class T>
RESODE_INLINE void round_group(Group<T>& v, bool whole, Codes& codes, uint16_t& scale) {
  using L = Levels<Bits>;
  using Signed = typename SignedOf<T>::Vec;
  if (whole) rotate(v);
  scale = round_up(largest(v));
  const T unit = T(scale_from(scale)) * T(L::kC);
  const T inverse = unit > 0 ? T(1) / unit : T(0);
  // Added to a number, this rounds it to an integer, which then stands in its lowest bits.
  constexpr T kMagic = sizeof(T) == 4 ? T(0x1.8p23) : T(0x1.8p52);
  const Signed zero = bit_cast<Signed>(Vec<T>{} + (kMagic + T(L::kLow)));
  Signed code[kGroupVectors<T>];
#pragma GCC unroll 16
  for (int i = 0; i < kGroupVectors<T>; ++i) {
    Vec<T> shifted = v.v[i] * inverse - T(L::kShift);
    if constexpr (Bits == 2) shifted = at_most(larger(Vec<T>{} + T(L::kLow), shifted), T(1));
    const Vec<T> moved = shifted + kMagic;
    code[i] = bit_cast<Signed>(moved) - zero;
    v.v[i] = ((moved - kMagic) + T(L::kShift)) * unit;
  }
  narrow_lanes<T>(code, codes.low);
  if constexpr (Bits > 8) {
#pragma GCC unroll 16
    for (int i = 0; i < kGroupVectors<T>; ++i) code[i] >>= 8;
    narrow_lanes<T>(code, codes.high);
  }
  if (whole) rotate(v);
}

// Q(v) from codes and scale.
template <int Bits, class T>
RESODE_INLINE Group<T> restored(const Codes& codes, uint16_t scale, bool whole) {
  using L = Levels<Bits>;
  const T unit = T(scale_from(scale)) * T(L::kC);
  Group<T> g;
#pragma GCC unroll 16
  for (int i = 0; i < kGroupVectors<T>; ++i) {
    typename SignedOf<T>::Vec code = widened<T>(codes.low, i);
    if constexpr (Bits > 8) code |= widened<T>(codes.high, i) << 8;
    g.v[i] = (__builtin_convertvector(code, Vec<T>) + T(L::kLow + L::kShift)) * unit;
  }
  if (whole) rotate(g);
  return g;
}

// ------------------------------------------------------------------------------------ many groups

// Where the elements of a group lie: some rows in the kernels' layout, or row-major.
template <class T>
struct InPanels {
  Matrix<T> m;

  int64_t rows() const { return m.rows; }
  int64_t row() const { return m.columns; }
  T* at(int64_t row, int64_t column) const {
    return m.at(column / kPanel<T>, row) + column % kPanel<T>;
  }
};
template <class T>
struct InRows {
  T* data;
  int64_t count, length;

  int64_t rows() const { return count; }
  int64_t row() const { return length; }
  T* at(int64_t row, int64_t column) const { return data + row * length + column; }
};

// The codes and scales of some rows.
struct Recorded {
  uint8_t* codes;
  uint16_t* scales;
};

// f(row, column, elements, its codes, its scale) for every group of these rows, `of` the groups of
// a row. Only for whole groups the number of elements is a constant.
template <int Bits, class Place, class F>
RESODE_INLINE void for_each_group(Place place, Recorded record, Share of, F f) {
  const int64_t bytes = code_bytes(place.row(), Bits), count = groups_of(place.row());
  for (int64_t g = of.begin; g < of.end; ++g) {
    const int64_t column = g * kGroup, elements = min(kGroup, place.row() - column);
    uint8_t* const codes = record.codes + g * (kGroup / kOctet * Bits);
    uint16_t* const scales = record.scales + g;
    if (elements == kGroup)
      for (int64_t r = 0; r < place.rows(); ++r)
        f(r, column, std::integral_constant<int, kGroup>{}, codes + r * bytes, scales[r * count]);
    else
      for (int64_t r = 0; r < place.rows(); ++r)
        f(r, column, int(elements), codes + r * bytes, scales[r * count]);
  }
}

// x̂ ← x̂ + Q(x − x̂), recorded. `estimate` and `moved` may be the same memory.
template <class Place>
void record(Place x, Place estimate, Place moved, Recorded to, int bits, Share of) {
  using T = std::remove_reference_t<decltype(*x.at(0, 0))>;
  with_bits(bits, [&](auto b) {
    for_each_group<b.value>(
        x, to, of,
        [=](int64_t r, int64_t column, auto elements, uint8_t* codes, uint16_t& scale)
            RESODE_ALWAYS {
              constexpr bool kWhole = !std::is_same_v<decltype(elements), int>;
              Group<T> v{};
#pragma GCC unroll 16
              for (int i = 0; i < kGroupVectors<T>; ++i) {
                const int64_t e = i * kLanes<T>;
                if (!kWhole && e >= elements) break;
                v.v[i] = load_some(x.at(r, column + e), elements - e) -
                         load_some(estimate.at(r, column + e), elements - e);
              }
              Codes packed;
              round_group<b.value>(v, kWhole, packed, scale);
              pack_codes<b.value>(packed, codes, (elements + kOctet - 1) / kOctet);
#pragma GCC unroll 16
              for (int i = 0; i < kGroupVectors<T>; ++i) {
                const int64_t e = i * kLanes<T>;
                if (!kWhole && e >= elements) break;
                store_some(moved.at(r, column + e), elements - e,
                           load_some(estimate.at(r, column + e), elements - e) + v.v[i]);
              }
            });
  });
}

// x̂ ← x̂ − Q(v), as recorded.
template <class Place>
void undo(Place estimate, Place moved, Recorded from, int bits, Share of) {
  using T = std::remove_reference_t<decltype(*estimate.at(0, 0))>;
  with_bits(bits, [&](auto b) {
    for_each_group<b.value>(
        estimate, from, of,
        [=](int64_t r, int64_t column, auto elements, uint8_t* codes, uint16_t& scale)
            RESODE_ALWAYS {
              constexpr bool kWhole = !std::is_same_v<decltype(elements), int>;
              Codes packed;
              unpack_codes<b.value>(packed, codes, (elements + kOctet - 1) / kOctet);
              const Group<T> v = restored<b.value, T>(packed, scale, kWhole);
#pragma GCC unroll 16
              for (int i = 0; i < kGroupVectors<T>; ++i) {
                const int64_t e = i * kLanes<T>;
                if (!kWhole && e >= elements) break;
                store_some(moved.at(r, column + e), elements - e,
                           load_some(estimate.at(r, column + e), elements - e) - v.v[i]);
              }
            });
  });
}

}  // namespace
