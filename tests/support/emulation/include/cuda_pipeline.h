// Stands in for CUDA's header. A copy happens when its thread waits for it, not before: a kernel
// that reads too early reads what was there, and one that reuses the source or the destination
// too early copies or gets the wrong numbers.

#pragma once

#include "cuda_runtime.h"

inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes) {
  if (bytes != 4 && bytes != 8 && bytes != 16)
    emulation::fail("asynchronous copies have 4, 8 or 16 bytes");
  emulation::copy_later(to, from, bytes);
}

inline void __pipeline_commit() { emulation::commit_copies(); }

inline void __pipeline_wait_prior(int prior) {
  for (emulation::Copy copy; emulation::copy_due(prior, copy);)
    for (size_t i = 0; i < copy.bytes / 4; ++i)
      static_cast<uint32_t*>(copy.to)[i] = static_cast<const uint32_t*>(copy.from)[i];
}
