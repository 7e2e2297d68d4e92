// Depth-fused MLP and linear stages on a GPU.

#pragma once

#include <optional>

#include "../stage.h"
#include "network.h"

namespace resode {

// How a pass is cut into launches.
struct Launches {
  const FusedKernels* kernels;
  Tiling tiling;
  size_t shared;  // bytes of shared memory of a CTA
  int programs;   // CTAs
  int steps;      // in a launch of the reverse pass, at most
};

// A pass that is ready to run. Refers to the stage and to io, Forward or Reverse.
template <class Io>
struct Plan {
  const Stage& stage;
  const Io& io;
  Gpu gpu;
  Launches launches;
  size_t workspace_bytes = 0;

  // The workspace has to begin at a multiple of 64 bytes.
  void run(void* workspace) const;
};

// Nothing if the stage is too wide: a tile of its rows does not fit into a CTA.
std::optional<Plan<Forward>> plan(const Stage& stage, const Forward& io, const Gpu& gpu);
std::optional<Plan<Reverse>> plan(const Stage& stage, const Reverse& io, const Gpu& gpu);

}  // namespace resode
