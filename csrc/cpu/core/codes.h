// The codes of a group of 32 elements: from the lanes of vectors to bytes, packed by octets of
// elements, those of an octet in b bytes (resode_kernels/recording.py).

#pragma once

#include <type_traits>

#include "matrix.h"

namespace {

constexpr int kGroup = 32, kOctet = 8;

template <class T>
constexpr int kGroupVectors = kGroup / kLanes<T>;

// Vectors of signed integers as wide as T.
template <class T>
struct SignedOf {
  using Lane = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  typedef Lane Vec __attribute__((vector_size(kVectorBytes)));
};

// A group's codes, element by element: their low bytes, and what is above them if there are more
// than 8 bits. An octet of codes is one number.
struct alignas(32) Codes {
  uint64_t low[kGroup / kOctet], high[kGroup / kOctet];
};

// octets ← the lowest byte of every lane of a group's vectors
template <class T, class V = typename SignedOf<T>::Vec>
RESODE_INLINE void narrow_lanes(const V (&codes)[kGroupVectors<T>], uint64_t* octets) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) {
    const __m256i byte = _mm256_set1_epi32(0xff);
    const auto masked = [&](int i) RESODE_ALWAYS { return __m256i(codes[i]) & byte; };
    const __m256i packed = _mm256_packus_epi16(_mm256_packus_epi32(masked(0), masked(1)),
                                               _mm256_packus_epi32(masked(2), masked(3)));
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_permutevar8x32_epi32(packed, in_order);
    memcpy(octets, &bytes, sizeof bytes);
    return;
  }
#endif
  typedef uint8_t Bytes __attribute__((vector_size(kLanes<T>)));
#pragma GCC unroll 16
  for (int i = 0; i < kGroupVectors<T>; ++i) {
    const Bytes bytes = __builtin_convertvector(codes[i], Bytes);
    memcpy(reinterpret_cast<uint8_t*>(octets) + i * kLanes<T>, &bytes, sizeof bytes);
  }
}

// Vector i of a group from its octets. (Of __builtin_convertvector compilers make an instruction
// for every lane.)
template <class T>
RESODE_INLINE typename SignedOf<T>::Vec widened(const uint64_t* octets, int i) {
  using V = typename SignedOf<T>::Vec;
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    return V(_mm512_maskz_cvtepu8_epi32(
        kAllLanes, _mm_set_epi64x(int64_t(octets[2 * i + 1]), int64_t(octets[2 * i]))));
  else
    return V(
        _mm512_maskz_cvtepu8_epi64(__mmask8(kAllLanes), _mm_cvtsi64_si128(int64_t(octets[i]))));
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4)
    return V(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(int64_t(octets[i]))));
  else
    return V(_mm256_cvtepu8_epi64(_mm_cvtsi64_si128(int64_t(octets[i / 2] >> 32 * (i % 2)))));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes<T>)));
  Bytes bytes;
  memcpy(&bytes, reinterpret_cast<const uint8_t*>(octets) + i * kLanes<T>, sizeof bytes);
  return __builtin_convertvector(bytes, V);
#endif
}

// The lowest Width bits of every byte of an octet, in Width bytes.
template <int Width>
RESODE_INLINE uint64_t pack_field(uint64_t octet) {
  if constexpr (Width == 8) return octet;
  octet &= Width == 4 ? 0x0f0f0f0f0f0f0f0f : Width == 2 ? 0x0303030303030303 : 0x0101010101010101;
  if constexpr (Width == 4) return octet | octet >> 28;
  if constexpr (Width == 2) return octet | octet >> 14 | octet >> 28 | octet >> 42;
  return octet * 0x0102040810204080 >> 56;
}
template <int Width>
RESODE_INLINE uint64_t unpack_field(uint64_t field) {
  if constexpr (Width == 8) return field;
  if constexpr (Width == 4) return (field | field << 28) & 0x0f0f0f0f0f0f0f0f;
  if constexpr (Width == 2)
    return (field | field << 14 | field << 28 | field << 42) & 0x0303030303030303;
  field = (field | field << 28) & 0x0000000f0000000f;
  field = (field | field << 14) & 0x0003000300030003;
  return (field | field << 7) & 0x0101010101010101;
}
template <int Width>
RESODE_INLINE void put(uint8_t* to, uint64_t octet) {
  const uint64_t field = pack_field<Width>(octet);
  memcpy(to, &field, Width);
}
template <int Width>
RESODE_INLINE uint64_t get(const uint8_t* from) {
  uint64_t field = 0;
  memcpy(&field, from, Width);
  return unpack_field<Width>(field);
}

// The fields of a code of `Bits` bits, as recording.FIELDS: two of them if there is no one width.
template <int Bits>
constexpr int kFirst = Bits == 3                ? 2
                       : Bits == 5 || Bits == 6 ? 4
                       : Bits > 8               ? 8
                                                : Bits;

template <int Bits>
RESODE_INLINE void pack_codes(const Codes& codes, uint8_t* to, int octets) {
  constexpr int kSecond = Bits - kFirst<Bits>;
#pragma GCC unroll 4
  for (int o = 0; o < octets; ++o, to += Bits) {
    put<kFirst<Bits>>(to, codes.low[o]);
    if constexpr (Bits > 8)
      put<kSecond>(to + 8, codes.high[o]);
    else if constexpr (kSecond > 0)
      put<kSecond>(to + kFirst<Bits>, codes.low[o] >> kFirst<Bits>);
  }
}

template <int Bits>
RESODE_INLINE void unpack_codes(Codes& codes, const uint8_t* from, int octets) {
  constexpr int kSecond = Bits - kFirst<Bits>;
#pragma GCC unroll 4
  for (int o = 0; o < octets; ++o, from += Bits) {
    codes.low[o] = get<kFirst<Bits>>(from);
    if constexpr (Bits > 8)
      codes.high[o] = get<kSecond>(from + 8);
    else if constexpr (kSecond > 0)
      codes.low[o] |= get<kSecond>(from + kFirst<Bits>) << kFirst<Bits>;
  }
}

}  // namespace
