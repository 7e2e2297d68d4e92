// Sums over a channel in two stages without atomics, so that a run repeats bit by bit: every CTA
// of the first writes partial results of its tiles, and the second joins those, both in an order
// that depends on nothing but the shape. What is summed is a T with an `add`; T{} is zero.

#pragma once

#include "tiles.h"

namespace resode {

// Adds what `threads` threads have (a power of two of them), pairwise, to `value` of the first.
// `number`: this thread's place among them; `apart`: threads from one of them to the next.
template <class T, int V>
__device__ __forceinline__ void join_threads(T (&value)[V], int number, int threads, int apart) {
  extern __shared__ __align__(16) unsigned char resode_shared[];
  T* values = reinterpret_cast<T*>(resode_shared) + threadIdx.x * V;
#pragma unroll
  for (int k = 0; k < V; ++k) values[k] = value[k];
  for (int half = threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (number >= half) continue;
#pragma unroll
    for (int k = 0; k < V; ++k) {
      value[k].add(values[half * apart * V + k]);
      values[k] = value[k];
    }
  }
}

// The end of the first stage: partials [gridDim.x, channels].
template <class T, int V>
__device__ __forceinline__ void write_partials(T* partials, T (&value)[V], const Part<V>& part) {
  const Tiles& tiles = part.tiles;
  if (part.channel_stride == 0) {  // all lanes are of one channel
#pragma unroll
    for (int k = 1; k < V; ++k) value[0].add(value[k]);
  }
  join_threads(value, part.position_thread, tiles.position_threads,
               tiles.rows.channels_adjoin ? tiles.channel_threads : 1);
  if (part.position_thread != 0 || !part.inside()) return;
  T* row = partials + blockIdx.x * tiles.rows.channels + part.channel;
#pragma unroll
  for (int k = 0; k < V; ++k)
    if (k == 0 || part.channel_stride) row[k] = value[k];
}

// In the second stage a CTA has 8 channels, neighbours in memory, and 32 threads for each.
constexpr int kJoinedChannels = 8;

template <class T>
struct Joined {
  T total[1];
  int64_t channel;
  bool here;  // whether this thread has the total

  __device__ __forceinline__ Joined(const T* partials, int programs, int64_t channels) {
    const int slice = threadIdx.x / kJoinedChannels, slices = kThreads / kJoinedChannels;
    channel = int64_t(blockIdx.x) * kJoinedChannels + threadIdx.x % kJoinedChannels;
    total[0] = T{};
    if (channel < channels)
      for (int program = slice; program < programs; program += slices)
        total[0].add(partials[program * channels + channel]);
    join_threads(total, slice, slices, kJoinedChannels);
    here = slice == 0 && channel < channels;
  }
};

inline dim3 join_grid(const Rows& rows) {
  return dim3(unsigned((rows.channels + kJoinedChannels - 1) / kJoinedChannels));
}

}  // namespace resode
