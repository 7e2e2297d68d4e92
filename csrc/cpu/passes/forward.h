// The forward pass:  x[n+1] = x[n] + h φ_n(x[n])  for n = 0 … N − 1, in place. If increments are
// recorded, an estimate follows:  x̂[0] = x[0],  x̂[n+1] = x̂[n] + Q(x[n+1] − x̂[n]).
//
// Memory traffic per step: the state once in and once out, the step's weights once; with increments
// the estimate once in and once out, the codes once out.

#pragma once

#include "recorder.h"
#include "schemes.h"
#include "worker.h"

namespace {

template <class T, class Scheme, ResidualBlock<T> Block>
size_t forward(const Stage& s, const resode::Forward& io, void* workspace, resode::Stop stop) {
  Arena arena(workspace);
  const Pass<T, Scheme, Block> pass(s, arena, nullptr);
  T* const y = static_cast<T*>(io.y);
  const bool in_result = pass.lives_in_result();
  const int count = !in_result + s.records();
  T* const states = count ? pass.states(arena, count) : nullptr;
  if (!workspace) return arena.used();

  Halt halt(s, stop);
  Team::run(pass.tiling.threads, halt, [&](Team team) {
    Worker<T, Scheme, Block> worker(pass, team);
    const States<T> own = count ? worker.own(states, count) : States<T>{};
    T* const state = in_result ? y : own[0];
    T* const estimate = s.records() ? own[count - 1] : nullptr;
    Recorder<T> recorder(s, io);
    worker.runner.block.record(io.statistics);
    worker.runner.signs = static_cast<uint8_t*>(io.signs);
    worker.read(state, static_cast<const T*>(io.x));
    if (estimate) worker.read(estimate, static_cast<const T*>(io.x));
    for (int64_t n = 0; n < s.steps && !team.halts(); ++n) {
      worker.begin_step(n);
      const bool keep = s.anchor_every && (n + 1) % s.anchor_every == 0 && n + 1 < s.steps;
      worker.for_each_tile([&](Share rows) {
        const Matrix<T> x = pass.tile(state, rows);
        if (recorder.keeps(n)) {
          worker.runner.block.meet();  // the crew's other threads have written the estimate as well
          worker.write_tile(static_cast<T*>(io.anchors) + recorder.anchor(), estimate, rows);
        }
        Scheme::slope(worker.runner, n, x, {{x.data, x.data, worker.runner.step}});
        if (estimate)
          recorder.record(n, x, pass.tile(estimate, rows), rows, worker.runner.block);
        else if (keep)
          worker.write_tile(pass.anchor(static_cast<T*>(io.anchors), n + 1), state, rows);
      });
      recorder.go_on(n);
    }
    worker.write(y, state, worker.runner.point);
  });
  return arena.used();
}

}  // namespace
