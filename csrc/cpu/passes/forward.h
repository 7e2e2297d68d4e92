// The forward pass:  x[n+1] = x[n] + h φ_n(x[n])  for n = 0 … N − 1, in place.
//
// Memory traffic per step: the state once in and once out, the step's weights once.

#pragma once

#include "schemes.h"
#include "worker.h"

namespace {

template <class T, class Scheme, ResidualBlock<T> Block>
size_t forward(const Stage& s, const resode::Forward& io, void* workspace, resode::Stop stop) {
  Arena arena(workspace);
  const Pass<T, Scheme, Block> pass(s, arena, nullptr);
  T* const y = static_cast<T*>(io.y);
  T* const states = pass.lives_in_result() ? nullptr : pass.states(arena, 1);
  if (!workspace) return arena.used();

  Halt halt(s, stop);
  Team::run(pass.tiling.threads, halt, [&](Team team) {
    Worker<T, Scheme, Block> worker(pass, team);
    T* const state = states ? worker.own(states, 1)[0] : y;
    worker.runner.block.record(io.statistics);
    worker.read(state, static_cast<const T*>(io.x));
    for (int64_t n = 0; n < s.steps && !team.halts(); ++n) {
      worker.begin_step(n);
      const bool keep = s.anchor_every && (n + 1) % s.anchor_every == 0 && n + 1 < s.steps;
      worker.for_each_tile([&](Share rows) {
        const Matrix<T> x = pass.tile(state, rows);
        Scheme::slope(worker.runner, n, x, {{x.data, x.data, worker.runner.step}});
        if (keep) worker.write_tile(pass.anchor(static_cast<T*>(io.anchors), n + 1), state, rows);
      });
    }
    worker.write(y, state, worker.runner.point);
  });
  return arena.used();
}

}  // namespace
