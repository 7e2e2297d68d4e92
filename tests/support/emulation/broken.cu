// Kernels with a mistake each, and their twins without it, for the tests of what sanitizers see:
//
//     broken <name> broken|intact

#include <cuda_pipeline.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "../../../csrc/cuda/launch.h"

namespace resode {
namespace {

constexpr int kThreads = 64, kRounds = 4;

// Threads of different warps pass on numbers without a barrier between.
template <bool broken>
__global__ void no_barrier(const float* x, float* y) {
  extern __shared__ __align__(16) unsigned char resode_shared[];
  float* numbers = reinterpret_cast<float*>(resode_shared);
  numbers[threadIdx.x] = x[threadIdx.x];
  if (!broken) __syncthreads();
  y[threadIdx.x] = numbers[kThreads - 1 - threadIdx.x];
}

// Numbers are replaced while others may still read them.
template <bool broken>
__global__ void no_second_barrier(const float* x, float* y) {
  extern __shared__ __align__(16) unsigned char resode_shared[];
  float* numbers = reinterpret_cast<float*>(resode_shared);
  for (int round = 0; round < kRounds; ++round) {
    numbers[threadIdx.x] = x[threadIdx.x] * float(round);
    __syncthreads();
    y[threadIdx.x] += numbers[kThreads - 1 - threadIdx.x];
    if (!broken) __syncthreads();
  }
}

// A barrier of the warp is not one of the block.
template <bool broken>
__global__ void too_small_a_barrier(const float* x, float* y) {
  extern __shared__ __align__(16) unsigned char resode_shared[];
  float* numbers = reinterpret_cast<float*>(resode_shared);
  numbers[threadIdx.x] = x[threadIdx.x];
  broken ? __syncwarp() : __syncthreads();
  y[threadIdx.x] = numbers[(threadIdx.x + 1) % kThreads];
}

// Lanes of a warp do not run in step.
template <bool broken>
__global__ void no_warp_barrier(const float* x, float* y) {
  extern __shared__ __align__(16) unsigned char resode_shared[];
  float* numbers = reinterpret_cast<float*>(resode_shared);
  numbers[threadIdx.x] = x[threadIdx.x];
  if (!broken) __syncwarp();
  y[threadIdx.x] = numbers[threadIdx.x ^ 1];
}

// The barrier does not wait for asynchronous copies.
template <bool broken>
__global__ void late_wait(const float* x, float* y) {
  extern __shared__ __align__(16) unsigned char resode_shared[];
  float* numbers = reinterpret_cast<float*>(resode_shared);
  __pipeline_memcpy_async(numbers + threadIdx.x, x + threadIdx.x, 4);
  __pipeline_commit();
  if (!broken) __pipeline_wait_prior(0);
  __syncthreads();
  y[threadIdx.x] = numbers[kThreads - 1 - threadIdx.x];
  if (broken) __pipeline_wait_prior(0);
}

// Every block writes the numbers of the first.
template <bool broken>
__global__ void same_block(const float* x, float* y) {
  int i = threadIdx.x + (broken ? 0 : blockIdx.x * blockDim.x);
  y[i] = x[threadIdx.x];
}

// The last thread writes behind y.
template <bool broken>
__global__ void off_by_one(const float* x, float* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[broken ? i + 1 : i] = x[threadIdx.x];
}

// The last thread writes behind the block's shared memory.
template <bool broken>
__global__ void beyond_shared(const float* x, float* y) {
  extern __shared__ __align__(16) unsigned char resode_shared[];
  float* numbers = reinterpret_cast<float*>(resode_shared);
  int i = broken ? threadIdx.x + 1 : threadIdx.x;
  numbers[i] = x[threadIdx.x];
  y[threadIdx.x] = numbers[i];
}

using Kernel = void (*)(const float*, float*);
struct Case {
  const char* name;
  Kernel kernels[2];  // intact, broken
};
#define CASE(name)                     \
  {                                    \
    #name, { name<false>, name<true> } \
  }
const Case cases[] = {
    CASE(no_barrier), CASE(no_second_barrier), CASE(too_small_a_barrier), CASE(no_warp_barrier),
    CASE(late_wait),  CASE(same_block),        CASE(off_by_one),          CASE(beyond_shared),
};

}  // namespace
}  // namespace resode

int main(int count, char** words) {
  using namespace resode;
  constexpr int blocks = 2;
  for (const Case& c : cases) {
    if (count != 3 || std::strcmp(words[1], c.name) != 0) continue;
    Kernel kernel = c.kernels[std::strcmp(words[2], "broken") == 0];
    std::vector<float> x(kThreads, 1), y(blocks * kThreads);
    size_t shared = kThreads * sizeof(float);
    // Kernels that know no blocks run as one.
    bool many = kernel == same_block<false> || kernel == same_block<true> ||
                kernel == off_by_one<false> || kernel == off_by_one<true>;
    launch(Gpu{}, kernel, many ? blocks : 1, kThreads, shared, x.data(), y.data());
    std::puts("done");
    return 0;
  }
  std::puts("broken <name> broken|intact");
  return 2;
}
