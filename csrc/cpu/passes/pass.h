// What the forward and the reverse pass share: the memory of a pass and its division among threads.

#pragma once

#include "schemes.h"
#include "../core/team.h"

namespace {

// A crew, most of the time one thread, has what it works with to itself: its rows of the states,
// the packed weights of the blocks in work, buffers for a tile, gradient sums. Packing a block
// costs little next to using it on a tile's rows, and nothing that another core has just written
// needs to be fetched. What all threads share in any case is in Block::Shared.
template <class T, class Scheme, class Block>
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
    bench(counter, {0, 1});
    private_bytes = counter.used() + apart();
    privates = arena.take<char>(private_bytes * crews());
  }

  int slots() const { return s.tied ? 1 : Scheme::kSlots; }
  int crews() const { return tiling.threads / tiling.crew; }
  int crew_index(Team team) const { return team.crew_index(tiling.crew); }

  // Prefetchers run ahead of what a core reads, by up to a tile. Where that is what another core is
  // writing, both wait for it to be passed to and fro: products of 128 rows took up to half as long
  // again. So what belongs to a crew lies this many bytes apart from what belongs to the next.
  int64_t apart() const {
    if (crews() == 1) return 0;
    const int64_t tile = tiling.max_tile_rows() * padded<T>(s.dim) * int64_t(sizeof(T));
    return ceil_div(min(2 * tile, 128 << 10), 64) * 64;
  }

  // Whether a state may live in a result of the pass, where threads' rows adjoin: without padding a
  // tile takes as much room as its rows, and many rows have few neighbours.
  bool lives_in_result() const {
    constexpr int64_t kMany = 512 << 10;
    return padded<T>(s.dim) == s.dim &&
           (crews() == 1 || s.rows * s.dim * int64_t(sizeof(T)) >= kMany * crews());
  }

  // Room for so many states, see Worker::own.
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

  Bench<T, Block> bench(Arena& arena, Team team) const {
    const int64_t rows = tiling.max_tile_rows(), size = rows * padded<T>(s.dim);
    Bench<T, Block> b{Block(s, shared, team), gradients, slots(), s.tied, whole(), T(s.step)};
    for (int i = 0; i < Scheme::kSlots; ++i)
      b.traces[i] = b.block.trace_space(arena, rows, gradients);
    b.point = arena.take<T>(size);
    if (Scheme::kSlots > 1) {
      b.first = arena.take<T>(size);
      b.middle = arena.take<T>(size);
    }
    for (int i = 0; i < b.slots; ++i) b.weights[i] = b.block.weights(arena, i, gradients);
    for (int i = 0; gradients && i < b.gradient_slots(); ++i) {
      b.gradients[i].scale = Scheme::gradient_scale(b.step);
      for (int k = 0; k < s.count; ++k) {
        const Matrix<T> shape = b.block.shape(k);
        if (!is_wanted(s, gradients, k) || b.is_whole(k)) continue;
        T* const shared_sum = b.block.shared_sum(i, k);
        b.gradients[i].of[k] = shared_sum ? Matrix<T>{shared_sum, shape.rows, shape.columns}
                                          : arena.matrix<T>(shape.rows, shape.columns);
      }
    }
    return b;
  }
};

// Several states, as far as they are one thread's.
template <class T>
struct States {
  T* first;
  int64_t size;

  T* operator[](int64_t i) const { return first + i * size; }
};

// One thread's part in a pass.
template <class T, class Scheme, class Block>
class Worker {
 public:
  Bench<T, Block> bench;

  Worker(const Pass<T, Scheme, Block>& pass, Team team)
      : bench(lay_out(pass, team)),
        pass(pass),
        team(team),
        tiles(pass.tiling.tiles, pass.crew_index(team), team.crews(pass.tiling.crew)) {}

  // Of `count` states, a crew has its rows of all of them together, and apart from the next crew's.
  // The pointers are such that the first row of a tile is where pass.tile expects it.
  States<T> own(T* states, int64_t count) const {
    const int64_t begin = pass.tiling.tile(tiles.begin).begin,
                  end = pass.tiling.tile(tiles.end - 1).end, row = padded<T>(pass.s.dim);
    T* const first =
        states + count * begin * row + pass.crew_index(team) * (pass.apart() / int64_t(sizeof(T)));
    return {first - begin * row, (end - begin) * row};
  }

  // f(rows) for every tile that this thread's crew owns.
  template <class F>
  void for_each_tile(F f) const {
    for (int64_t i = tiles.begin; i < tiles.end; ++i) f(pass.tiling.tile(i));
  }

  // state ← rows, and back; given a spare tile, the rows may be the state's own memory.
  void read(T* state, const T* rows_of_state) {
    for_each_tile([&](Share rows) {
      if (bench.block.leads())
        from_rows(pass.tile(state, rows), pass.tile_rows(rows_of_state, rows));
    });
    bench.block.meet();
  }
  void write(T* rows_of_state, T* state, T* spare = nullptr) {
    for_each_tile([&](Share rows) { write_tile(rows_of_state, state, rows, spare); });
  }
  void write_tile(T* rows_of_state, T* state, Share rows, T* spare = nullptr) {
    if (bench.block.leads())
      to_rows(pass.tile_rows(rows_of_state, rows), pass.tile(state, rows), spare);
  }

  // Makes the blocks of step n ready.
  void begin_step(int64_t n) {
    for (int64_t m = n; m < n + Scheme::kSlots; ++m) {
      const int64_t index = bench.index(m), slot = bench.slot(m);
      if (held[slot] == index) continue;
      bench.block.pack_weights(bench.weights[slot], index);
      held[slot] = index;
    }
  }

  // The reverse pass needs all crews' sums for a block's gradient. Where there are slots to get
  // ahead with, nobody waits for them at once: a thread that has walked step n writes its share of
  // the gradients that step n + 1 completed, and it uses a slot again when all have written theirs.
  // So a thread may be a step ahead of another, and a delay on one core does not stop the others.

  void begin_reverse_step(int64_t n) {
    begin_step(n);
    if (!pass.s.tied) Countdown::wait(pass.written, team.size, n + 1 + Block::kAhead);
  }

  void end_reverse_step(int64_t n) {
    pass.walked[team.rank].set(n);
    const int64_t due = n + (Block::kAhead > 0);
    if (!pass.s.tied && due < pass.s.steps) write_gradients(due);
    if (n == 0 && (pass.s.tied || due > 0)) write_gradients(0);
  }

 private:
  const Pass<T, Scheme, Block>& pass;
  const Team team;
  const Share tiles;
  int64_t held[2] = {-1, -1};  // the blocks whose weights are in the slots

  static Bench<T, Block> lay_out(const Pass<T, Scheme, Block>& pass, Team team) {
    Arena arena(pass.privates + pass.crew_index(team) * pass.private_bytes);
    return pass.bench(arena, team);
  }

  // This thread's share of the gradients that are complete after step n.
  void write_gradients(int64_t n) {
    Countdown::wait(pass.walked, team.size, n);
    const int64_t begin = n > 0 ? n + Scheme::kSlots - 1 : 0;
    const int64_t end = pass.s.tied ? 1 : n + Scheme::kSlots;
    for (int64_t m = begin; m < end; ++m) write_gradient(m);
    pass.written[team.rank].set(n);
  }

  // ∇θ_n = c Σ over crews
  void write_gradient(int64_t n) {
    Gradient<T>& mine = bench.gradient(n);
    mine.fresh = true;
    with_storage<T>(pass.s.storage, [&](auto storage) {
      for (int k = 0; k < pass.s.count; ++k) {
        auto* const out = static_cast<decltype(storage)*>(bench.result(n, k));
        if (!out || bench.is_whole(k)) continue;
        const int64_t stride = pass.private_bytes / sizeof(T);
        bench.block.write_gradient(k, out, mine.of[k], stride, mine.scale);
      }
    });
  }
};

}  // namespace
