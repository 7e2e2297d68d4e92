// Depth-fused MLP and linear stages on a GPU. As on the CPU (stage.h), a pass that is called with
// workspace = null runs nothing and returns the bytes of workspace it needs (256-byte aligned).

#pragma once

#include "../stage.h"
#include "launch.h"

namespace resode {

// Whether a tile of the stage's rows fits into the shared memory of the GPU.
bool covers(const Stage& stage, const Forward& io, const Gpu& gpu);
bool covers(const Stage& stage, const Reverse& io, const Gpu& gpu);

size_t run(const Stage& stage, const Forward& io, const Gpu& gpu, void* workspace);
size_t run(const Stage& stage, const Reverse& io, const Gpu& gpu, void* workspace);

}  // namespace resode
