// The builds of the CPU kernels, one for each instruction set, that this program is linked with.

#pragma once

#include <vector>

#include "stage.h"

namespace resode {

#if defined(RESODE_WITH_BASELINE)
extern const Kernels kernels_baseline;
#endif
#if defined(RESODE_WITH_AVX2)
extern const Kernels kernels_avx2;
#endif
#if defined(RESODE_WITH_AVX512_NARROW)
extern const Kernels kernels_avx512_narrow;
#endif
#if defined(RESODE_WITH_AVX512)
extern const Kernels kernels_avx512;
#endif

struct Build {
  const Kernels* kernels;
  bool supported;  // by this processor
};

// From the plainest to the widest.
inline std::vector<Build> find_builds() {
  std::vector<Build> all;
  [[maybe_unused]] const auto has_avx512 = [] {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
  };
#if defined(RESODE_WITH_BASELINE)
  all.push_back({&kernels_baseline, true});
#endif
#if defined(RESODE_WITH_AVX2)
  all.push_back({&kernels_avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")});
#endif
#if defined(RESODE_WITH_AVX512_NARROW)
  all.push_back({&kernels_avx512_narrow, has_avx512()});
#endif
#if defined(RESODE_WITH_AVX512)
  all.push_back({&kernels_avx512, has_avx512()});
#endif
  return all;
}

inline const std::vector<Build>& builds() {
  static const std::vector<Build> all = find_builds();
  return all;
}

}  // namespace resode
