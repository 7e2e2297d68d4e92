// Threads and the tiles of rows they own.
//
// The rows of a pass are cut into tiles that stay in a core's cache while a step works on them;
// every thread owns the same contiguous run of tiles through all steps, so that sums over rows are
// formed in one fixed order and results repeat bit for bit at a given number of threads.

#pragma once

#include <sched.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "../stage.h"
#include "storage.h"

namespace {

struct Tiling {
  int64_t rows, tiles;
  int threads;

  // Bytes of a tile's buffers that should stay in the second-level cache.
  static constexpr int64_t kTileBytes = 512 << 10;
  static constexpr int64_t kMinTileRows = 24, kMaxTileRows = 192;
  // Multiply-adds in one matrix product below which another thread costs more than it brings.
  static constexpr int64_t kMinThreadWork = 32 << 10;

  template <class T>
  static Tiling of(const resode::Stage& s) {
    const int64_t row_bytes = (3 * padded<T>(s.dim) + 2 * padded<T>(s.hidden)) * int64_t(sizeof(T));
    const int64_t tile_rows = max(kMinTileRows, min(kMaxTileRows, kTileBytes / row_bytes));
    const int64_t worth = ceil_div(s.rows * s.dim * s.hidden, kMinThreadWork);
    const int threads = int(max(1, min(s.threads, min(worth, s.rows))));
    return {s.rows, threads * ceil_div(s.rows, threads * tile_rows), threads};
  }

  Share tile(int64_t i) const { return Share(rows, i, tiles); }
  int64_t max_tile_rows() const { return ceil_div(rows, tiles); }
};

struct Team {
  int rank, size;

  // Runs f(team) on `threads` threads, or on as many as there are to be had.
  template <class F>
  static void run(int threads, F f) {
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
    f(Team{omp_get_thread_num(), omp_get_num_threads()});
#else
    (void)threads;
    f(Team{0, 1});
#endif
  }
};

// A number that a thread counts down for the others to see.
struct alignas(64) Countdown {
  int64_t value;

  void set(int64_t now) { __atomic_store_n(&value, now, __ATOMIC_RELEASE); }

  // Returns when all `count` have come down to `target`. Spins: waits are rare and short, and to
  // sleep and be woken takes longer.
  static void wait(const Countdown* all, int count, int64_t target) {
    constexpr int kPatience = 20000;
    for (int i = 0; i < count; ++i)
      for (int spins = 0; __atomic_load_n(&all[i].value, __ATOMIC_ACQUIRE) > target; ++spins)
        if (spins > kPatience) sched_yield();  // there may be more threads than cores
  }
};

}  // namespace
