// The memory of a pass, forward or reverse, and its division among threads.

#pragma once

#include "runner.h"

namespace {

// Each crew, mostly one thread, has memory of its own: its rows of the states, the packed weights
// of the blocks in work, buffers for a tile, gradient sums. Packing a block's weights costs little
// compared with their use on a tile's rows, and no core has to fetch what another has just written.
// Memory that all threads share is in Block::Shared.
template <class T, class Scheme, ResidualBlock<T> Block>
struct Pass {
  const Stage& s;
  const Tiling tiling;
  void* const* const gradients;
  const typename Block::Shared shared;
  Countdown *walked, *written;  // one per thread, see Worker
  char* privates;
  size_t private_bytes;

  // `gradients` is null in a pass without VJPs, otherwise it is the table of the gradients that are
  // wanted.
  Pass(const Stage& s, Arena& arena, void* const* gradients)
      : s(s),
        tiling(Block::tiling(s)),
        gradients(gradients),
        shared(s, tiling, arena, slots(), gradients) {
    walked = arena.take<Countdown>(tiling.threads);
    written = arena.take<Countdown>(tiling.threads);
    Arena counter(nullptr);
    runner(counter, {0, 1});
    private_bytes = counter.used() + apart();
    privates = arena.take<char>(private_bytes * crews());
  }

  int slots() const { return s.tied ? 1 : Scheme::kSlots; }
  int crews() const { return tiling.threads / tiling.crew; }
  int crew_index(Team team) const { return team.crew_index(tiling.crew); }

  // The bytes between the memory of one crew and that of the next. Prefetchers run ahead of a
  // core's reads, by up to a tile. If another core is writing there, cache lines go to and fro
  // between the two: products of 128 rows took up to 1.5 times as long.
  int64_t apart() const {
    if (crews() == 1) return 0;
    const int64_t tile = tiling.max_tile_rows() * padded<T>(s.dim) * int64_t(sizeof(T));
    return ceil_div(min(2 * tile, 128 << 10), 64) * 64;
  }

  // Whether a state may live in a result of the pass. It fits there if no column is padded. The
  // crews' rows then adjoin, without the bytes between them, which does no harm if each crew has
  // many.
  bool lives_in_result() const {
    constexpr int64_t kMany = 512 << 10;
    return padded<T>(s.dim) == s.dim &&
           (crews() == 1 || s.rows * s.dim * int64_t(sizeof(T)) >= kMany * crews());
  }

  // Memory for `count` states, see Worker::own.
  T* states(Arena& arena, int64_t count) const {
    const int64_t gaps = (crews() - 1) * apart() / int64_t(sizeof(T));
    return arena.take<T>(count * s.rows * padded<T>(s.dim) + gaps);
  }

  // Whether a weight's gradient is one product: of all rows, in the one step that uses the block.
  bool whole() const {
    return Block::kWritesWhole && Scheme::kSlots == 1 && !s.tied && tiling.tiles == 1 &&
           is_stored_as<T>(s.storage);
  }

  // The rows of a tile, in a state of the kernels' layout and in a row-major one.
  Matrix<T> tile(T* state, Share rows) const {
    return {state + rows.begin * padded<T>(s.dim), rows.end - rows.begin, s.dim};
  }
  template <class U>
  U* tile_rows(U* state, Share rows) const {
    return state + rows.begin * s.dim;
  }

  // Where the anchor x[n] lies, row-major.
  template <class U>
  U* anchor(U* anchors, int64_t n) const {
    return anchors + (n / s.anchor_every - 1) * s.rows * s.dim;
  }

  BlockRunner<T, Block> runner(Arena& arena, Team team) const {
    const int64_t rows = tiling.max_tile_rows(), size = rows * padded<T>(s.dim);
    BlockRunner<T, Block> r{Block(s, shared, team), gradients, slots(), s.tied, whole(), T(s.step)};
    for (int i = 0; i < Scheme::kSlots; ++i)
      r.traces[i] = r.block.trace_space(arena, rows, gradients);
    r.point = arena.take<T>(size);
    if (Scheme::kSlots > 1) {
      r.first = arena.take<T>(size);
      r.middle = arena.take<T>(size);
    }
    for (int i = 0; i < r.slots; ++i) r.weights[i] = r.block.weights(arena, i, gradients);
    for (int i = 0; gradients && i < r.gradient_slots(); ++i) {
      r.gradients[i].scale = Scheme::gradient_scale(r.step);
      for (int k = 0; k < s.count; ++k) {
        const Matrix<T> shape = r.block.shape(k);
        if (!is_wanted(s, gradients, k) || r.is_whole(k)) continue;
        T* const shared_sum = r.block.shared_sum(i, k);
        r.gradients[i].of[k] = shared_sum ? Matrix<T>{shared_sum, shape.rows, shape.columns}
                                          : arena.matrix<T>(shape.rows, shape.columns);
      }
    }
    return r;
  }
};

}  // namespace
