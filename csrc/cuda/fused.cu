// The kernels of depth-fused stages in one precision, RESODE_PRECISION, and their launches.

#include "schemes.h"

namespace resode {
namespace {

struct Precisions {
  using float32 = Float32;
  using tf32 = Tf32;
  using float16 = Half<__half>;
  using bfloat16 = Half<__nv_bfloat16>;
};
using P = Precisions::RESODE_PRECISION;

// x[n+1] = x[n] + h φ_n(x[n]) for n = begin … end − 1. A CTA walks its tile of rows
// through all steps.
template <class Blocks>
__global__ void __launch_bounds__(kThreads, 1)
    walk_kernel(const __grid_constant__ Network net, const __grid_constant__ Walk walk) {
  const Place place(net, blockIdx.x);
  Steps<Blocks> steps(net, false);
  State x = place.load(walk.x);
  float* anchor = walk.anchors;
  for (int n = walk.begin; n < walk.end; ++n) {
    if (n > walk.begin && (n - walk.begin) % walk.anchor_every == 0) {
      place.store(anchor, x);
      anchor += net.rows * net.dim;
    }
    x = fma(net.h, steps.slope(place, x, n, n + 1 < walk.end ? n + 1 : -1), x);
  }
  place.store(walk.y, x);
}

// The steps end − 1 … begin of the reverse pass. A CTA walks one tile of rows after the
// other through all of them; its sums of gradients run through all its tiles.
template <class Blocks>
__global__ void __launch_bounds__(kThreads, 1)
    reverse_kernel(const __grid_constant__ Network net, const __grid_constant__ ReverseWalk walk) {
  const int64_t tiles = (net.rows + net.tiling.rows - 1) / net.tiling.rows;
  Steps<Blocks> steps(net, true);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const bool first_tile = tile == blockIdx.x;
    const Place place(net, tile);
    State g = place.load(walk.cotangent);
    steps.begin(place, place.load(walk.start));
    for (int n = walk.end - 1; n >= walk.begin; --n) steps.reverse(place, walk, n, first_tile, g);
    if (walk.end_state) place.store(walk.end_state, steps.state(place));
    place.store(walk.end_cotangent, g);
  }
}

// ∂θ_n = Σ over the programs' sums, in their order; `groups` CTAs for each block n.
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(const __grid_constant__ Reduction r, unsigned groups) {
  using Weight = P::Weight;
  const int64_t i = int64_t(blockIdx.x % groups) * kThreads + threadIdx.x;
  const int n = r.first + int(blockIdx.x / groups);
  for (int k = 0; k < kBlockParameters; ++k) {
    const int64_t offset = r.sums.offsets[k];
    if (offset < 0 || i < offset || i >= offset + r.elements[k]) continue;
    const float* const at = r.sums.at + int64_t(n % r.sums.slots) * r.programs * r.sums.size + i;
    float sum = 0;
#pragma unroll 8
    for (int program = 0; program < r.programs; ++program) sum += at[program * r.sums.size];
    narrow(sum, static_cast<Weight*>(r.gradients[k])[n * r.strides[k] + (i - offset)]);
  }
}

void launch_walk(const Gpu& gpu, Block block, int programs, size_t shared, const Network& net,
                 const Walk& walk) {
  launch(gpu, block == Block::mlp ? walk_kernel<Mlp<P>> : walk_kernel<Linear<P>>, dim3(programs),
         kThreads, shared, net, walk);
}

void launch_reverse(const Gpu& gpu, Block block, int programs, size_t shared, const Network& net,
                    const ReverseWalk& walk) {
  launch(gpu, block == Block::mlp ? reverse_kernel<Mlp<P>> : reverse_kernel<Linear<P>>,
         dim3(programs), kThreads, shared, net, walk);
}

void launch_reduce(const Gpu& gpu, int blocks, const Reduction& reduction) {
  const auto groups = unsigned((reduction.sums.size + kThreads - 1) / kThreads);
  launch(gpu, reduce_kernel, dim3(groups * blocks), kThreads, 0, reduction, groups);
}

}  // namespace

#define RESODE_JOIN(a, b) a##b
#define RESODE_NAME(precision) RESODE_JOIN(fused_, precision)
extern const FusedKernels RESODE_NAME(RESODE_PRECISION);
const FusedKernels RESODE_NAME(RESODE_PRECISION) = {int(sizeof(P::Weight)), launch_walk,
                                                    launch_reverse, launch_reduce};

}  // namespace resode
