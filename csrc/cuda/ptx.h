// The instructions that CUDA C++ has no function for. Layouts of the fragments are those of the PTX
// ISA; g = lane / 4 and t = lane % 4 number the lanes of a warp.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#if !defined(__CUDACC__)
#include <emulated_ptx.h>  // the tests', for the host
#else

namespace resode::ptx {

// d += a b for a tile of 16 × 8 numbers over a depth of 16 (f16, bf16) or 8 (tf32).
//   d  [g, 2t], [g, 2t+1], [g+8, 2t], [g+8, 2t+1]
//   a  16-bit: pairs [g, 2t..], [g+8, 2t..], [g, 2t+8..], [g+8, 2t+8..];
//      tf32: [g, t], [g+8, t], [g, t+4], [g+8, t+4]
//   b  16-bit: pairs [2t.., g], [2t+8.., g];  tf32: [t, g], [t+4, g]
#define RESODE_MMA(name, shape)                                                            \
  __device__ __forceinline__ void name(float (&d)[4], const uint32_t (&a)[4],              \
                                       const uint32_t (&b)[2]) {                           \
    asm("mma.sync.aligned." shape " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                   \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));               \
  }
RESODE_MMA(mma_f16, "m16n8k16.row.col.f32.f16.f16.f32")
RESODE_MMA(mma_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
RESODE_MMA(mma_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
#undef RESODE_MMA

// Four matrices of 8 rows of 16 bytes in shared memory; lane l gives the address of row l % 8 of
// matrix l / 8. Of every matrix a lane gets the t-th four bytes of row g; transposed: of a matrix
// of 16-bit numbers, its elements [2t, g] and [2t+1, g].
template <bool transposed>
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], const void* row) {
  const auto address = uint32_t(__cvta_generic_to_shared(row));
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// Rounded to nearest; without it the tensor cores would cut the low bits off.
__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}

}  // namespace resode::ptx

#endif
