// Where kernels run, and their launches. A launch never synchronizes and never allocates, so a
// stream that is being captured into a graph can take it.
//
// A CTA (cooperative thread array) is what CUDA calls a thread block: here, a block is a residual
// block. A warp is 32 threads of a CTA.

#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <tuple>

namespace resode {

// A GPU as far as launches depend on it, and the stream to launch on.
struct Gpu {
  int index;
  int processors;        // streaming multiprocessors
  size_t shared_memory;  // bytes that a CTA may have
  size_t cache;          // bytes of the last cache before DRAM
  bool tf32;             // products of float32 numbers may be made in TF32
  cudaStream_t stream;
};

inline void check(cudaError_t error, const char* doing) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("CUDA: ") + doing + ": " + cudaGetErrorString(error));
}

// Makes a device the current one, to which launches go, for as long as this object lives.
class OnDevice {
 public:
  explicit OnDevice(int index) {
    check(cudaGetDevice(&before_), "asking for the device");
    if (before_ == index) return;
    check(cudaSetDevice(index), "selecting the device");
    changed_ = true;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

template <class... Parameters, class... Arguments>
void launch(const Gpu& gpu, void (*kernel)(Parameters...), dim3 ctas, int threads, size_t shared,
            Arguments... arguments) {
  std::tuple<Parameters...> values(arguments...);  // of the types that the kernel takes
  const OnDevice there(gpu.index);
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)),
        "reserving shared memory");
  std::apply(
      [&](auto&... value) {
        void* table[] = {&value...};
        check(cudaLaunchKernel(kernel, ctas, dim3(threads), table, shared, gpu.stream),
              "launching a kernel");
      },
      values);
}

}  // namespace resode
