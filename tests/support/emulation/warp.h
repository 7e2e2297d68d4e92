// What the lanes of a warp do together: each leaves what it has, and the last one to come does the
// work of all.

#pragma once

#include "emulator.h"

namespace emulation {

struct Lane {
  int index;
  union {
    struct {
      uint32_t value;
      int source;
    } shuffle;
    struct {
      const void* row;
      const uint16_t* rows[8];
    } matrix;
    struct {
      float d[4];
      uint32_t a[4], b[2];
    } product;
  };
};

using Together = void (*)(Lane* lanes, int count);

void meet_in_warp(unsigned mask, Lane& mine, Together together, Place place);

// Whether memory is the block's shared memory.
bool in_shared(const void* address, size_t bytes);

}  // namespace emulation
