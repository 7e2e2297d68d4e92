// How a long pass is stopped between its steps. One thread asks the caller, all threads look at
// what it has decided (team.h).

#pragma once

#include <chrono>

#include "../../stage.h"
#include "matrix.h"

namespace {

class Halt {
 public:
  Halt() = default;  // never
  Halt(const resode::Stage& s, resode::Stop stop)
      : stop(stop),
        interval(stop.seconds > 0 ? max(1, kWork / max(1, s.rows * s.dim * s.hidden)) : 1),
        last(Clock::now()) {}

  bool decided() const { return __atomic_load_n(&stopped, __ATOMIC_RELAXED); }

  // Called by the thread that called the pass, between steps.
  void ask() {
    if (!stop.asked || ++steps % interval != 0) return;
    const auto now = Clock::now();
    if (std::chrono::duration<double>(now - last).count() < stop.seconds) return;
    if (stop.asked(stop.context)) __atomic_store_n(&stopped, true, __ATOMIC_RELAXED);
    last = Clock::now();
  }

 private:
  using Clock = std::chrono::steady_clock;
  // Multiply-adds that take some 10 to 100 µs. Steps of the smallest stages take less than a look
  // at the clock is worth.
  static constexpr int64_t kWork = 1 << 20;

  resode::Stop stop{};
  int64_t interval = 1, steps = 0;  // between two looks at the clock; so far
  Clock::time_point last;
  bool stopped = false;
};

}  // namespace
