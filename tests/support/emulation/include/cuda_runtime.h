// Stands in for CUDA's header: the part of it that the kernels use.

#pragma once

#include <math.h>

#include <algorithm>
#include <bit>
#include <tuple>
#include <utility>

#include "emulator.h"

#define __global__
#define __device__
#define __host__
#define __shared__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

#define RESODE_VECTORS(type, name)                                 \
  struct __align__(2 * sizeof(type)) name##2 { type x, y; };       \
  struct __align__(4 * sizeof(type)) name##4 { type x, y, z, w; }; \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
RESODE_VECTORS(float, float)
RESODE_VECTORS(int, int)
RESODE_VECTORS(unsigned, uint)
#undef RESODE_VECTORS

inline constexpr const uint3& threadIdx = emulation::here.thread;
inline constexpr const uint3& blockIdx = emulation::here.block;
inline constexpr const dim3& blockDim = emulation::here.block_size;
inline constexpr const dim3& gridDim = emulation::here.grid_size;

using std::max, std::min;

inline void __syncthreads(emulation::Place place = emulation::Place::current()) {
  emulation::sync_block(place);
}
inline void __syncwarp(unsigned mask = 0xffffffffu,
                       emulation::Place place = emulation::Place::current()) {
  emulation::sync_warp(mask, place);
}

// Shuffles move numbers within groups of `width` lanes.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              emulation::Place place = emulation::Place::current()) {
  int lane = (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
  int first = lane / width * width;
  uint32_t bits = emulation::shuffle(mask, std::bit_cast<uint32_t>(value),
                                     first + (source & (width - 1)), place);
  return std::bit_cast<T>(bits);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32,
                  emulation::Place place = emulation::Place::current()) {
  int lane = (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
  int source = lane ^ distance;
  bool inside = source / width <= lane / width && source < 32;
  uint32_t bits =
      emulation::shuffle(mask, std::bit_cast<uint32_t>(value), inside ? source : lane, place);
  return std::bit_cast<T>(bits);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32,
                   emulation::Place place = emulation::Place::current()) {
  int lane = (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;
  int source = lane + int(distance);
  bool inside = source / width == lane / width;
  uint32_t bits =
      emulation::shuffle(mask, std::bit_cast<uint32_t>(value), inside ? source : lane, place);
  return std::bit_cast<T>(bits);
}

template <class T>
T __ldg(const T* address) {
  return *address;
}
inline int atomicMax(int* address, int value) {
  int now = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (now < value && !__atomic_compare_exchange_n(address, &now, value, true, __ATOMIC_RELAXED,
                                                     __ATOMIC_RELAXED)) {
  }
  return now;
}
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }

// The host's side. A launch runs at once; an error is described by its latest text.

using cudaStream_t = struct CUstream_st*;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorLaunchFailure = 719,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

namespace emulation {

inline thread_local std::string latest_text;
inline thread_local cudaError_t latest_error = cudaSuccess;

inline cudaError_t report(cudaError_t error, const std::string& text) {
  if (error != cudaSuccess) latest_error = error, latest_text = text;
  return error;
}

template <class... Parameters, size_t... i>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<i...>) {
  kernel(*static_cast<Parameters*>(arguments[i])...);
}

}  // namespace emulation

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : emulation::latest_text.c_str();
}
inline cudaError_t cudaGetLastError() {
  return std::exchange(emulation::latest_error, cudaSuccess);
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }

inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  if (value < 0 || size_t(value) > emulation::kMaxShared)
    return emulation::report(cudaErrorInvalidValue,
                             std::to_string(value) + " bytes of shared memory");
  emulation::allow_shared(kernel, size_t(value));
  return cudaSuccess;
}

template <class... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments,
                             size_t shared = 0, cudaStream_t = nullptr) {
  auto call = [](const emulation::Kernel& k) {
    auto typed = reinterpret_cast<void (*)(Parameters...)>(const_cast<void*>(k.name));
    emulation::call(typed, k.arguments, std::index_sequence_for<Parameters...>());
  };
  std::string error = emulation::launch({reinterpret_cast<const void*>(kernel), call, arguments},
                                        grid, block, shared);
  return emulation::report(error.empty() ? cudaSuccess : cudaErrorLaunchFailure, error);
}
