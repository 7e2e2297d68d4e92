// What must be inlined for a kernel to stay in registers, in every compiler's words.

#pragma once

#define RESODE_ALWAYS __attribute__((always_inline))  // behind a lambda's parameters
#define RESODE_INLINE inline RESODE_ALWAYS            // before a function
