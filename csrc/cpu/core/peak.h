// The rate of multiply-adds on registers alone, an upper bound for every matrix product.

#pragma once

#include <chrono>

#include "simd.h"
#include "team.h"

// Makes the compiler forget what it knows about a vector, and keep it in a register.
#if defined(__x86_64__)
#define RESODE_OPAQUE(v) asm volatile("" : "+x"(v))
#else
#define RESODE_OPAQUE(v) asm volatile("" : "+w"(v))
#endif

namespace {

double fma_peak(int threads, double seconds) {
  constexpr int kChains = 12;  // independent, so that latency is hidden
  constexpr int kRounds = 1 << 12;
  double total = 0;
  Halt never;
  Team::run(threads, never, [&](Team) {
    using Clock = std::chrono::steady_clock;
    Vec<float> chain[kChains] = {}, factor = Vec<float>{} + 0.999f, term = Vec<float>{} + 1e-3f;
    RESODE_OPAQUE(factor);
    RESODE_OPAQUE(term);
    double flops = 0, elapsed = 0;
    for (const auto start = Clock::now(); elapsed < seconds;
         elapsed = std::chrono::duration<double>(Clock::now() - start).count()) {
      for (int i = 0; i < kRounds; ++i) {
#pragma GCC unroll 16
        for (int c = 0; c < kChains; ++c) {
          chain[c] = chain[c] * factor + term;
          RESODE_OPAQUE(chain[c]);
        }
      }
      flops += 2.0 * kRounds * kChains * kLanes<float>;
    }
#if defined(_OPENMP)
#pragma omp atomic
#endif
    total += flops / elapsed;
  });
  return total;
}

}  // namespace
