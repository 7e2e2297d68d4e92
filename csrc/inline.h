// What must be inlined for a kernel to stay in registers, in every compiler's words.

#pragma once

#define RESODE_ALWAYS __attribute__((always_inline))  // behind a lambda's parameters
#if defined(__CUDACC__)
#define RESODE_INLINE __host__ __device__ __forceinline__  // before a function
#else
#define RESODE_INLINE inline RESODE_ALWAYS
#endif
