// Threads and their division of the work.
//
// The rows of a pass are cut into tiles that stay in a core's cache while a step works on them.
// Threads form crews: a crew owns the same contiguous run of tiles through all steps. Most crews
// are one thread. Where rows are few and wide there are several threads in a crew, each with its
// share of the columns of every product, so that each packs and sums up only a share of the
// weights. Either way sums over rows are formed in one fixed order, and results repeat bit for bit
// at a given number of threads.

#pragma once

#include <sched.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "../../stage.h"
#include "halt.h"
#include "storage.h"

namespace {

struct Tiling {
  int64_t units, rows_per_unit;  // what a tile may not divide: a row, an image
  int64_t tiles;
  int threads;
  int crew = 1;  // threads that work on the same tiles

  // Enough rows to amortize a block's weights and gradient sums, which are read once per tile; few
  // enough that the operands of a product stay in the second-level cache.
  static constexpr int64_t kMinTileRows = 72, kMaxTileRows = 144, kOperandBytes = 192 << 10;
  // Multiply-adds in one matrix product below which another thread costs more than it brings.
  static constexpr int64_t kMinThreadWork = 32 << 10;

  // Tiles for blocks that work row by row.
  template <class T>
  static Tiling of_rows(const resode::Stage& s) {
    const int64_t worth = ceil_div(s.rows * s.dim * s.hidden, kMinThreadWork);
    const int64_t threads = max(1, min(s.threads, worth));
    const int64_t panels = ceil_div(min(s.dim, s.hidden), kPanel<T>);
    int64_t crew = 1, crews = max(1, min(threads, s.rows));
    double best = step_time(s, crews, crew, panels);
    for (int64_t c = 2; c <= min(threads, panels); ++c) {
      const int64_t count = max(1, min(threads / c, s.rows));
      const double time = step_time(s, count, c, panels);
      if (time <= best) best = time, crew = c, crews = count;  // of equals, the fewest copies
    }
    const int64_t fitting = kOperandBytes / (max(s.dim, s.hidden) * int64_t(sizeof(T)));
    const int64_t tile_rows = max(kMinTileRows, min(fitting, kMaxTileRows));
    const int64_t tiles = crews * ceil_div(s.rows, crews * tile_rows);
    return {s.rows, 1, tiles, int(crews * crew), int(crew)};
  }

  // Images that batch normalization connects: the threads go through every evaluation together,
  // each with its share of the images as its one tile.
  static Tiling of_images(const resode::Stage& s);

  Share tile(int64_t i) const {
    Share share(units, i, tiles);
    share.begin *= rows_per_unit;
    share.end *= rows_per_unit;
    return share;
  }
  int64_t max_tile_rows() const { return ceil_div(units, tiles) * rows_per_unit; }

 private:
  // The time of a step, in units of one row's products on one thread. The threads of a crew divide
  // the products of its rows by panels of columns. In the same way they divide the costs of a block
  // that do not depend on the rows: packing its weights, summing up and writing its gradients. But
  // they meet after every product, and each fetches the other threads' columns from their cores.
  // The narrower the block, the more this weighs. (Measured with AVX-512 and 2 threads, widths 64
  // to 1024.)
  static double step_time(const resode::Stage& s, int64_t crews, int64_t crew, int64_t panels) {
    constexpr double kBlock = 40, kFetched = 190, kMeetings = 250e3;
    const double rows = double(ceil_div(s.rows, crews));
    const double share = double(ceil_div(panels, crew)) / double(panels);
    const double alone = (rows + kBlock) * share;
    if (crew == 1) return alone;
    const double fetched =
        kFetched / double(min(s.dim, s.hidden)) * double(crew - 1) / double(crew);
    return alone + rows * fetched + kMeetings / double(s.dim * s.hidden);
  }
};

// A number that a thread counts down for the others to see.
struct alignas(64) Countdown {
  int64_t value;

  void set(int64_t now) { __atomic_store_n(&value, now, __ATOMIC_RELEASE); }
  bool above(int64_t target) const { return __atomic_load_n(&value, __ATOMIC_ACQUIRE) > target; }
};

struct Team {
  int rank, size;
  Halt* halt = nullptr;

  // Called between steps. Whether the pass is being stopped: its threads leave, each when it comes
  // here, and what they have computed is of no use.
  bool halts() const {
    if (rank == 0) halt->ask();
    return halt->decided();
  }

  // Returns when all `count` have come down to `target`, or the pass is being stopped: those that
  // are waited for may have left. Spins: waits are rare and short, and to sleep and be woken takes
  // longer.
  void wait(const Countdown* all, int count, int64_t target) const {
    constexpr int kPatience = 20000;
    for (int i = 0; i < count; ++i)
      for (int spins = 0; all[i].above(target) && !halt->decided(); ++spins)
        if (spins > kPatience) sched_yield();  // there may be more threads than cores
  }

  // The team as crews of `threads` threads each, in order; the last crew also has those left over.
  int crews(int threads) const { return int(max(1, size / threads)); }
  int crew_index(int threads) const { return int(min(rank / threads, crews(threads) - 1)); }
  Team crew(int threads) const {
    const int index = crew_index(threads), first = index * threads;
    return {rank - first, index + 1 < crews(threads) ? threads : size - first, halt};
  }

  // Runs f(team) on `threads` threads, or on fewer if OpenMP grants fewer.
  template <class F>
  static void run(int threads, Halt& halt, F f) {
#if defined(_OPENMP)
    const int dynamic = omp_get_dynamic();
    omp_set_dynamic(0);  // as many as last time
#pragma omp parallel num_threads(threads)
    f(Team{omp_get_thread_num(), omp_get_num_threads(), &halt});
    omp_set_dynamic(dynamic);
#else
    (void)threads;
    f(Team{0, 1, &halt});
#endif
  }

  // How many threads `run` gets when it asks for this many.
  static int available(int threads) {
    int size = 1;
    Halt never;
    run(threads, never, [&](Team team) {
      if (team.rank == 0) size = team.size;
    });
    return size;
  }
};

inline Tiling Tiling::of_images(const resode::Stage& s) {
  const int64_t pixels = s.height * s.width, images = s.rows / pixels;
  const int threads = Team::available(int(min(s.threads, images)));
  return {images, pixels, threads, threads};
}

// number ← max(number, to), whatever other threads do to it
inline void raise(int32_t& number, int32_t to) {
  int32_t now = __atomic_load_n(&number, __ATOMIC_RELAXED);
  while (now < to && !__atomic_compare_exchange_n(&number, &now, to, true, __ATOMIC_RELAXED,
                                                  __ATOMIC_RELAXED)) {
  }
}

// A thread of a team whose threads meet: each waits until all have come.
class Crew {
 public:
  Crew(Team team, Countdown* arrivals) : team(team), arrivals(arrivals) {}
  const Team team;

  Share share(int64_t count) const { return {count, team.rank, team.size}; }

  void meet() {
    if (team.size == 1) return;
    arrivals[team.rank].set(--meetings);
    team.wait(arrivals, team.size, meetings);
  }

 private:
  Countdown* const arrivals;  // one per thread, all zero at the start
  int64_t meetings = 0;
};

// Several sums that all threads add to, round after round. Each thread begins at another sum and
// goes round, so that mostly no two threads are at the same one. The order in which threads come to
// a sum is always the same.
class Turns {
 public:
  // `done`: how often each sum was added to, counted below zero; all zero at the start
  Turns(Team team, int sums, Countdown* done) : team(team), sums(sums), done(done) {}

  // f(sum, whether it is the first of the round to add to it), for all of them
  template <class F>
  void go_round(F f) {
    for (int i = 0; i < sums; ++i) {
      const int sum = (start(team.rank) + i) % sums;
      const int before_me = place(sum);
      const int64_t before = rounds * team.size + before_me;
      team.wait(done + sum, 1, -before);
      f(sum, before_me == 0);
      done[sum].set(-before - 1);
    }
    ++rounds;
  }

 private:
  const Team team;
  const int sums;
  Countdown* const done;
  int64_t rounds = 0;

  int start(int rank) const { return rank * sums / team.size; }
  // How many threads come to the sum before this one.
  int place(int sum) const {
    const auto steps = [&](int rank) { return (sum - start(rank) + sums) % sums; };
    int count = 0;
    for (int rank = 0; rank < team.size; ++rank)
      count +=
          steps(rank) < steps(team.rank) || (steps(rank) == steps(team.rank) && rank < team.rank);
    return count;
  }
};

}  // namespace
