// Large pages for memory that is about to be filled. A stage's gradients come as a few large
// allocations that the system makes anew in every training step. By pages of 4 KiB that took two
// fifths of a step of a wide stage with few rows.

#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace resode {

// Whole large pages only, all of them inside the given memory, so that no more is used. The system
// may decline.
inline void use_large_pages(uintptr_t address, size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 2 << 20;
  const uintptr_t begin = (address + kPage - 1) / kPage * kPage,
                  end = (address + bytes) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)address, (void)bytes;
#endif
}

}  // namespace resode
