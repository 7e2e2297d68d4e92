// The weights of a stage on their way through shared memory.

#pragma once

#include <cuda_pipeline.h>

#include "network.h"
#include "precision.h"

namespace resode {

// Copies a matrix into a tile of shared memory, with zeros beyond its rows and columns. Aligned
// rows go 16 bytes at a time without passing through registers; the copies are complete when every
// thread has waited for its own and then passed a barrier.
template <class T>
__device__ __forceinline__ void copy_async(Tile<T> to, int tile_rows, int tile_columns,
                                           const T* from, int64_t pitch, int rows, int columns) {
  constexpr int kVector = 16 / int(sizeof(T));
  const bool aligned = reinterpret_cast<uintptr_t>(from) % 16 == 0 && pitch % kVector == 0;
  const int vectors = tile_columns / kVector;
  for (int i = threadIdx.x; i < tile_rows * vectors; i += kThreads) {
    const int row = i / vectors, column = i % vectors * kVector;
    T* const target = to(row, column);
    const T* const source = from + row * pitch + column;
    if (aligned && row < rows && column + kVector <= columns) {
      __pipeline_memcpy_async(target, source, 16);
      continue;
    }
#pragma unroll 1
    for (int e = 0; e < kVector; ++e) {
      const bool inside = row < rows && column + e < columns;
      if (inside && sizeof(T) == 4)
        __pipeline_memcpy_async(target + e, source + e, 4);
      else
        target[e] = inside ? source[e] : T{};
    }
  }
}

// The chunks of the blocks' weights, `chunks` of each block, in two buffers: while the threads work
// with one chunk, the next is loaded into the other buffer. `source.load(block, i, buffer)` copies
// a block's i-th chunk. A chunk that is still in a buffer is not loaded again.
class DoubleBuffer {
 public:
  __device__ explicit DoubleBuffer(int chunks) : chunks_(chunks) {}

  __device__ __forceinline__ int chunks() const { return chunks_; }

  // Returns the buffer that holds the block's i-th chunk, and begins to load the chunk after it:
  // the block's own or the first one of the block `next` (−1: none). When this returns, all threads
  // have finished what they did before.
  template <class Source>
  __device__ __forceinline__ int acquire(int block, int i, int next, const Source& source) {
    const int64_t chunk = int64_t(block) * chunks_ + i;
    const int64_t after = i + 1 < chunks_ ? chunk + 1 : next < 0 ? -1 : int64_t(next) * chunks_;
    if (held_ != chunk) {
      const int64_t before = held_;
      buffer_ ^= 1, held_ = other_, other_ = before;
    }
#pragma unroll 1  // the code of the copies is there once, not twice
    for (int ahead = 0; ahead < 2; ++ahead) {
      const int64_t wanted = ahead ? after : chunk;
      if (wanted >= 0 && wanted != held_ && wanted != other_) {
        __pipeline_wait_prior(0);  // an unused load may still be in flight to this buffer
        source.load(int(wanted / chunks_), int(wanted % chunks_), buffer_ ^ ahead);
        __pipeline_commit();
        (ahead ? other_ : held_) = wanted;
      }
      if (ahead) break;
      __pipeline_wait_prior(0);
      __syncthreads();
    }
    return buffer_;
  }

 private:
  const int chunks_;
  int buffer_ = 0;
  int64_t held_ = -1, other_ = -1;  // the chunks in the current and in the other buffer
};

}  // namespace resode
