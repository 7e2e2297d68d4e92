// Depth-fused MLP and linear stages on a GPU.

#pragma once

#include <optional>

#include "../stage.h"
#include "network.h"

namespace resode {

// How a pass is laid out.
struct Plan {
  const FusedKernels* kernels;
  Tiling tiling;
  size_t shared;  // bytes of shared memory of a CTA
  int programs;   // CTAs
  int steps;      // in a launch of the reverse pass, at most
};

// Nothing if the stage is too wide: a tile of its rows does not fit into a CTA.
std::optional<Plan> plan(const Stage& stage, const Forward& io, const Gpu& gpu);
std::optional<Plan> plan(const Stage& stage, const Reverse& io, const Gpu& gpu);

// As on the CPU (stage.h): with workspace = null nothing runs, and the bytes of workspace that are
// needed are returned. It has to begin at a multiple of 256 bytes. The stage must have a plan.
size_t run(const Stage& stage, const Forward& io, const Gpu& gpu, void* workspace);
size_t run(const Stage& stage, const Reverse& io, const Gpu& gpu, void* workspace);

}  // namespace resode
