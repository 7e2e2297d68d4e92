// Small kernels for the tests of the emulator itself, called by way of ctypes. A function returns
// what went wrong, or null.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>
#include <emulated_ptx.h>

#include "../../../csrc/cuda/launch.h"

namespace resode {
namespace {

constexpr unsigned kAll = 0xffffffffu;

// y = the numbers of x, those of every block in reverse order
__global__ void reverse_blocks(const int* x, int* y) {
  extern __shared__ __align__(16) unsigned char resode_shared[];
  int* numbers = reinterpret_cast<int*>(resode_shared);
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  numbers[threadIdx.x] = x[i];
  __syncthreads();
  y[i] = numbers[blockDim.x - 1 - threadIdx.x];
}

// y[0] = Σ x by a tree of barriers
__global__ void sum(const float* x, float* y) {
  extern __shared__ __align__(16) unsigned char resode_shared[];
  float* partial = reinterpret_cast<float*>(resode_shared);
  partial[threadIdx.x] = x[threadIdx.x];
  for (unsigned half = blockDim.x / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *y = partial[0];
}

// Notes the order in which threads get their turn: a race, which only an emulation decides.
__attribute__((no_sanitize("thread"))) __global__ void note_turns(int* count, int* turns) {
  turns[(*count)++] = blockIdx.x * blockDim.x + threadIdx.x;
}

__global__ void shuffle(int* y, int kind, int argument, int width) {
  int lane = threadIdx.x;
  if (kind == 0) lane = __shfl_sync(kAll, lane, argument, width);
  if (kind == 1) lane = __shfl_xor_sync(kAll, lane, argument, width);
  if (kind == 2) lane = __shfl_down_sync(kAll, lane, unsigned(argument), width);
  y[threadIdx.x] = lane;
}

__global__ void multiply(float* d, const uint32_t* a, const uint32_t* b, int product) {
  float sums[4];
  uint32_t left[4], right[2];
  for (int i = 0; i < 4; ++i) sums[i] = d[4 * threadIdx.x + i], left[i] = a[4 * threadIdx.x + i];
  for (int i = 0; i < 2; ++i) right[i] = b[2 * threadIdx.x + i];
  if (product == 0) ptx::mma_f16(sums, left, right);
  if (product == 1) ptx::mma_bf16(sums, left, right);
  if (product == 2) ptx::mma_tf32(sums, left, right);
  for (int i = 0; i < 4; ++i) d[4 * threadIdx.x + i] = sums[i];
}

// Loads four matrices whose rows lie one after another, from `offset` bytes on.
__global__ void load_matrices(const uint32_t* x, uint32_t* y, bool transposed, int offset) {
  extern __shared__ __align__(16) unsigned char resode_shared[];
  uint32_t* numbers = reinterpret_cast<uint32_t*>(resode_shared);
  for (int i = 0; i < 4; ++i) numbers[32 * i + threadIdx.x] = x[32 * i + threadIdx.x];
  __syncwarp();
  uint32_t r[4];
  const void* row = resode_shared + 16 * threadIdx.x + offset;
  transposed ? ptx::ldmatrix<true>(r, row) : ptx::ldmatrix<false>(r, row);
  for (int i = 0; i < 4; ++i) y[4 * threadIdx.x + i] = r[i];
}

// d = a b of half precision, a [16, 16] and b [16, 8] row by row, as kernels do it.
__global__ void multiply_tile(const __half* a, const __half* b, float* d) {
  extern __shared__ __align__(16) unsigned char resode_shared[];
  __half* left = reinterpret_cast<__half*>(resode_shared);
  __half* right = left + 16 * 16;
  int lane = threadIdx.x;
  __pipeline_memcpy_async(left + 8 * lane, a + 8 * lane, 16);
  if (lane < 16) __pipeline_memcpy_async(right + 8 * lane, b + 8 * lane, 16);
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncwarp();
  uint32_t of_a[4], of_b[4];
  ptx::ldmatrix<false>(of_a, left + 16 * (lane % 16) + 8 * (lane / 16));
  ptx::ldmatrix<true>(of_b, right + 8 * (lane % 16));
  float sums[4] = {};
  ptx::mma_f16(sums, of_a, {of_b[0], of_b[1]});
  for (int i = 0; i < 4; ++i) d[8 * (lane / 4 + 8 * (i / 2)) + 2 * (lane % 4) + i % 2] = sums[i];
}

// What is in shared memory before, and after waiting for the first and for both of two copies.
__global__ void copy_two(float* x, float* y) {
  extern __shared__ __align__(16) unsigned char resode_shared[];
  float* numbers = reinterpret_cast<float*>(resode_shared);
  for (int i = 0; i < 2; ++i) {
    __pipeline_memcpy_async(numbers + i, x + i, 4);
    __pipeline_commit();
  }
  for (int waited = 0; waited < 3; ++waited) {
    if (waited) __pipeline_wait_prior(2 - waited);
    for (int i = 0; i < 2; ++i) y[2 * waited + i] = numbers[i];
  }
}

__global__ void copy_aside(const float* x, int offset) {
  extern __shared__ __align__(16) unsigned char resode_shared[];
  __pipeline_memcpy_async(resode_shared + offset, x, 16);
}

__global__ void read_shared(uint32_t* y) {
  extern __shared__ __align__(16) unsigned char resode_shared[];
  uint32_t* numbers = reinterpret_cast<uint32_t*>(resode_shared);
  y[blockIdx.x * blockDim.x + threadIdx.x] = numbers[threadIdx.x];
  numbers[threadIdx.x] = 0;
}

__global__ void round_numbers(const float* x, uint16_t* half, uint16_t* bfloat16, uint32_t* tf32,
                              int count) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  half[i] = __float2half_rn(x[i]).bits;
  bfloat16[i] = __float2bfloat16_rn(x[i]).bits;
  tf32[i] = ptx::to_tf32(x[i]);
}

__global__ void widen_numbers(const uint16_t* x, float* half, float* bfloat16) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  half[i] = __half2float(__half{x[i]});
  bfloat16[i] = __bfloat162float(__nv_bfloat16{x[i]});
}

__global__ void return_early() {
  if (threadIdx.x >= 32) return;
  __syncthreads();
}

__global__ void meet_elsewhere() {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
}

__global__ void meet_by_halves() {
  if (threadIdx.x < 16) __syncwarp();
  __syncthreads();
}

std::string latest_error;

template <class... Parameters, class... Arguments>
const char* attempt(void (*kernel)(Parameters...), dim3 blocks, int threads, size_t shared,
                    Arguments... arguments) {
  Gpu gpu{};
  try {
    launch(gpu, kernel, blocks, threads, shared, arguments...);
  } catch (const std::exception& error) {
    latest_error = error.what();
    return latest_error.c_str();
  }
  return nullptr;
}

}  // namespace
}  // namespace resode

#define EXPORT extern "C" __attribute__((visibility("default"))) const char*
using namespace resode;

EXPORT run_reverse_blocks(const int* x, int* y, int blocks, int threads) {
  return attempt(reverse_blocks, blocks, threads, 4 * threads, x, y);
}
EXPORT run_sum(const float* x, float* y, int threads) {
  return attempt(sum, 1, threads, 4 * threads, x, y);
}
EXPORT run_note_turns(int* count, int* turns, int blocks, int threads) {
  return attempt(note_turns, blocks, threads, 0, count, turns);
}
EXPORT run_shuffle(int* y, int kind, int argument, int width, int threads) {
  return attempt(shuffle, 1, threads, 0, y, kind, argument, width);
}
EXPORT run_multiply(float* d, const uint32_t* a, const uint32_t* b, int product, int threads) {
  return attempt(multiply, 1, threads, 0, d, a, b, product);
}
EXPORT run_load_matrices(const uint32_t* x, uint32_t* y, bool transposed, int offset) {
  return attempt(load_matrices, 1, 32, 512, x, y, transposed, offset);
}
EXPORT run_multiply_tile(const __half* a, const __half* b, float* d) {
  return attempt(multiply_tile, 1, 32, 1024, a, b, d);
}
EXPORT run_copy_two(float* x, float* y) { return attempt(copy_two, 1, 1, 8, x, y); }
EXPORT run_copy_aside(const float* x, int offset) {
  return attempt(copy_aside, 1, 1, 64, x, offset);
}
EXPORT run_read_shared(uint32_t* y, int blocks, int threads) {
  return attempt(read_shared, blocks, threads, 4 * threads, y);
}
EXPORT run_round_numbers(const float* x, uint16_t* half, uint16_t* bfloat16, uint32_t* tf32,
                         int count) {
  return attempt(round_numbers, (count + 255) / 256, 256, 0, x, half, bfloat16, tf32, count);
}
EXPORT run_widen_numbers(const uint16_t* x, float* half, float* bfloat16) {
  return attempt(widen_numbers, 256, 256, 0, x, half, bfloat16);
}
EXPORT run_return_early() { return attempt(return_early, 1, 64, 0); }
EXPORT run_meet_elsewhere() { return attempt(meet_elsewhere, 1, 64, 0); }
EXPORT run_meet_by_halves() { return attempt(meet_by_halves, 1, 64, 0); }

// A launch without anything that launch.h does for it.
EXPORT run_bare(int threads, size_t shared) {
  uint32_t y[2048];
  uint32_t* address = y;
  void* arguments[] = {&address};
  cudaGetLastError();  // of a launch before
  cudaError_t error = cudaLaunchKernel(read_shared, dim3(1), dim3(threads), arguments, shared);
  if (error != cudaGetLastError()) return "the latest error is another one";
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
