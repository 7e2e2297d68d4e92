// One thread's part in a pass: its tiles of the states, the weights of the blocks in work, and its
// share of the gradients.

#pragma once

#include "../core/storage.h"
#include "pass.h"

namespace {

// Several states: the rows of one thread's crew.
template <class T>
struct States {
  T* first;
  int64_t size;

  T* operator[](int64_t i) const { return first + i * size; }
};

// One thread's part in a pass.
template <class T, class Scheme, ResidualBlock<T> Block>
class Worker {
 public:
  BlockRunner<T, Block> runner;
  const Team team;

  Worker(const Pass<T, Scheme, Block>& pass, Team team)
      : runner(lay_out(pass, team)),
        team(team),
        pass(pass),
        tiles(pass.tiling.tiles, pass.crew_index(team), team.crews(pass.tiling.crew)) {}

  // This crew's rows of `count` states, which lie together and apart from the next crew's. The
  // pointers are shifted so that pass.tile finds the rows of a tile.
  States<T> own(T* states, int64_t count) const {
    const int64_t begin = pass.tiling.tile(tiles.begin).begin,
                  end = pass.tiling.tile(tiles.end - 1).end, row = padded<T>(pass.s.dim);
    T* const first =
        states + count * begin * row + pass.crew_index(team) * (pass.apart() / int64_t(sizeof(T)));
    return {first - begin * row, (end - begin) * row};
  }

  // f(rows) for every tile that this thread's crew owns.
  template <class F>
  void for_each_tile(F f) {
    for (int64_t i = tiles.begin; i < tiles.end; ++i) {
      const Share rows = pass.tiling.tile(i);
      runner.first_row = rows.begin;
      f(rows);
    }
  }

  // state ← rows, and back; given a spare tile, the rows may be the state's own memory.
  void read(T* state, const T* rows_of_state) {
    for_each_tile([&](Share rows) {
      if (runner.block.leads())
        from_rows(pass.tile(state, rows), pass.tile_rows(rows_of_state, rows));
    });
    runner.block.meet();
  }
  void write(T* rows_of_state, T* state, T* spare = nullptr) {
    for_each_tile([&](Share rows) { write_tile(rows_of_state, state, rows, spare); });
  }
  void write_tile(T* rows_of_state, T* state, Share rows, T* spare = nullptr) {
    if (runner.block.leads())
      to_rows(pass.tile_rows(rows_of_state, rows), pass.tile(state, rows), spare);
  }

  // Makes the blocks of step n ready.
  void begin_step(int64_t n) {
    for (int64_t m = n; m < n + Scheme::kSlots; ++m) {
      const int64_t index = runner.index(m), slot = runner.slot(m);
      if (held[slot] == index) continue;
      runner.block.pack_weights(runner.weights[slot], index);
      held[slot] = index;
    }
  }

  // A block's gradient is the sum of all crews' sums. With slots to spare (kAhead) no thread waits
  // for the others at once: a thread that has made step n writes its share of the gradients that
  // step n + 1 completed, and it reuses a slot when all threads have written theirs. So a thread
  // may be a step ahead of another, and a delay on one core does not stop the others.

  void begin_reverse_step(int64_t n) {
    begin_step(n);
    if (!pass.s.tied) team.wait(pass.written, team.size, n + 1 + Block::kAhead);
  }

  void end_reverse_step(int64_t n) {
    pass.walked[team.rank].set(n);
    const int64_t due = n + (Block::kAhead > 0);
    if (!pass.s.tied && due < pass.s.steps) write_gradients(due);
    if (n == 0 && (pass.s.tied || due > 0)) write_gradients(0);
  }

 private:
  const Pass<T, Scheme, Block>& pass;
  const Share tiles;
  int64_t held[2] = {-1, -1};  // the blocks whose weights are in the slots

  static BlockRunner<T, Block> lay_out(const Pass<T, Scheme, Block>& pass, Team team) {
    Arena arena(pass.privates + pass.crew_index(team) * pass.private_bytes);
    return pass.runner(arena, team);
  }

  // This thread's share of the gradients that are complete after step n.
  void write_gradients(int64_t n) {
    team.wait(pass.walked, team.size, n);
    const int64_t begin = n > 0 ? n + Scheme::kSlots - 1 : 0;
    const int64_t end = pass.s.tied ? 1 : n + Scheme::kSlots;
    for (int64_t m = begin; m < end; ++m) write_gradient(m);
    pass.written[team.rank].set(n);
  }

  // ∇θ_n = c Σ over crews
  void write_gradient(int64_t n) {
    Gradient<T>& mine = runner.gradient(n);
    mine.fresh = true;
    with_storage<T>(pass.s.storage, [&](auto storage) {
      for (int k = 0; k < pass.s.count; ++k) {
        auto* const out = static_cast<decltype(storage)*>(runner.result(n, k));
        if (!out || runner.is_whole(k)) continue;
        const int64_t stride = pass.private_bytes / sizeof(T);
        runner.block.write_gradient(k, out, mine.of[k], stride, mine.scale);
      }
    });
  }
};

}  // namespace
