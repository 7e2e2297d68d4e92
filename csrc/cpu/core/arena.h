// Lays buffers out in one workspace, 64-byte aligned. Without a workspace it only counts, so the
// code that lays a pass out is also the code that says how much memory the pass needs.

#pragma once

#include <cstddef>

#include "matrix.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace {

class Arena {
 public:
  explicit Arena(void* base) : base(reinterpret_cast<uintptr_t>(base)) {}

  template <class T>
  T* take(int64_t count) {
    const uintptr_t at = base + bytes;
    bytes += ceil_div(count * int64_t(sizeof(T)), 64) * 64;
#if defined(__SANITIZE_ADDRESS__)  // a red zone behind every buffer, right after its last element
    bytes += 64;
    const uintptr_t end = at + count * sizeof(T);
    if (base) ASAN_POISON_MEMORY_REGION(reinterpret_cast<void*>(end), base + bytes - end);
#endif
    return reinterpret_cast<T*>(at);
  }

  template <class T>
  Matrix<T> matrix(int64_t rows, int64_t columns) {
    return {take<T>(rows * padded<T>(columns)), rows, columns};
  }

  size_t used() const { return bytes; }
  bool real() const { return base; }  // not just counting

 private:
  uintptr_t base;
  size_t bytes = 0;
};

}  // namespace
