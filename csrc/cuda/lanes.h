// Loads from memory of any dtype to float32 registers, and stores.
//
// A thread moves V neighbours at once, up to 16 bytes in one access. The dtype is a number that all
// threads of a launch share, so that there is one kernel for every mixture of dtypes.

#pragma once

#include <cstdint>
#include <initializer_list>

#include "layerwise.h"
#include "storage.h"

namespace resode {

inline int bytes_of(DType type) { return type == DType::float32 ? 4 : 2; }

// How many neighbours a thread may move at once where lines of `length` adjoining numbers are to be
// divided evenly: 8 of 16 bits, 4 if some are float32, 1 if the length or an address is no multiple
// of that.
inline int lanes_of(int64_t length, std::initializer_list<Array> arrays) {
  for (int lanes : {8, 4}) {
    bool fits = length % lanes == 0;
    for (const Array& array : arrays) {
      const int bytes = lanes * bytes_of(array.type);
      if (array.at) fits &= bytes <= 16 && reinterpret_cast<uintptr_t>(array.at) % bytes == 0;
    }
    if (fits) return lanes;
  }
  return 1;
}

// Calls f(constant) with the number of lanes as a compile-time constant.
template <int V>
struct Lanes {
  static constexpr int value = V;
};
template <class F>
void with_lanes(int lanes, F f) {
  if (lanes == 8)
    f(Lanes<8>{});
  else if (lanes == 4)
    f(Lanes<4>{});
  else
    f(Lanes<1>{});
}

template <class T, int V>
struct alignas(V * sizeof(T)) Pack {
  T values[V];
};

// Calls f with a null pointer to the array's type, of which V fit into 16 bytes.
template <int V, class F>
__device__ __forceinline__ void with_type(DType type, F f) {
  if (type == DType::float16)
    f(static_cast<__half*>(nullptr));
  else if (type == DType::bfloat16)
    f(static_cast<__nv_bfloat16*>(nullptr));
  else if constexpr (V * sizeof(float) <= 16)
    f(static_cast<float*>(nullptr));
}

// The numbers i, i + 1, … of the array; i is a multiple of V.
template <int V>
__device__ __forceinline__ void read(const Array& array, int64_t i, float (&to)[V]) {
  with_type<V>(array.type, [&]<class T>(T*) {
    const auto pack = *reinterpret_cast<const Pack<T, V>*>(static_cast<const T*>(array.at) + i);
#pragma unroll
    for (int k = 0; k < V; ++k) to[k] = widen(pack.values[k]);
  });
}

template <int V>
__device__ __forceinline__ void write(const Array& array, int64_t i, const float (&from)[V]) {
  with_type<V>(array.type, [&]<class T>(T*) {
    Pack<T, V> pack;
#pragma unroll
    for (int k = 0; k < V; ++k) narrow(from[k], pack.values[k]);
    *reinterpret_cast<Pack<T, V>*>(static_cast<T*>(array.at) + i) = pack;
  });
}

// The numbers i, i + stride, …; `absent` where there is no array.
template <int V>
__device__ __forceinline__ void gather(const Array& array, int64_t i, int64_t stride, float absent,
                                       float (&to)[V]) {
#pragma unroll
  for (int k = 0; k < V; ++k) to[k] = absent;
  if (array.at == nullptr) return;
  with_type<1>(array.type, [&]<class T>(T*) {
#pragma unroll
    for (int k = 0; k < V; ++k) to[k] = widen(static_cast<const T*>(array.at)[i + k * stride]);
  });
}

}  // namespace resode
