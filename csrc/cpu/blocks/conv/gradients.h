// The gradients of the parameters: whose sums are whose, the turns that threads take at a shared
// one, and the way back from sums at the points to torch's layout.

#pragma once

#include "../../core/team.h"
#include "packing.h"

namespace {

// The shape of the k-th gradient sum, of a weight at the points; its data are null.
template <class T>
Matrix<T> gradient_shape(const Stage& s, int k) {
  const int l = k / kPerLayer;
  const int64_t in = s.convolutions[l].in, out = s.convolutions[l].out;
  return {nullptr, k % kPerLayer == kWeight ? window_of(s, l).points() * in : 1, out};
}

// Large sums of weight gradients, if there are many threads: one for a crew, whose threads add to
// it in turns. Other sums are each thread's own.
template <class T>
struct SharedSums {
  T* of[2][kMaxLayers] = {};          // of each slot and layer; null: each thread has its own
  Countdown* added[kMaxLayers] = {};  // of each crew: how often, at each point
  int threads = 1;                    // in a crew

  SharedSums() = default;
  SharedSums(const Stage& s, const Tiling& tiling, Arena& arena, int slots, void* const* wanted) {
    threads = int(ceil_div(tiling.threads, kMaxSums));
    const int64_t crews = max(1, tiling.threads / threads);
    for (int l = 0; threads > 1 && l < s.layers; ++l) {
      const int64_t size = gradient_shape<T>(s, l * kPerLayer + kWeight).size();
      if (!is_wanted(s, wanted, l * kPerLayer + kWeight) || window_of(s, l).points() != kPoints ||
          size * int64_t(sizeof(T)) < kLargeSum)
        continue;
      for (int slot = 0; slot < slots; ++slot) of[slot][l] = arena.take<T>(crews * size);
      added[l] = arena.take<Countdown>(crews * kPoints);
      for (int64_t i = 0; arena.real() && i < crews * kPoints; ++i) added[l][i].value = 0;
    }
  }

 private:
  // Sums of one block at most, and the bytes from which on they are large: a product then takes so
  // long that threads rarely wait for their turn. (With 2 threads and one sum a step took 4 to 8 %
  // longer, and each further sum of 256 channels is 8 MiB.)
  static constexpr int64_t kMaxSums = 4, kLargeSum = 1 << 20;
};

// One thread's part in the gradients.
template <class T>
class Gradients {
 public:
  Gradients(const Stage& s, const SharedSums<T>& shared, Team team)
      : s(s),
        shared(shared),
        team(team),
        adders(team.crew(shared.threads)),
        sum_index(team.crew_index(shared.threads)),
        turns{turns_of(0), turns_of(1), turns_of(2)} {}

  // The sum that this thread's crew adds the k-th gradient to; null: the thread has its own.
  T* shared_sum(int slot, int k) const {
    T* const sums = k % kPerLayer == kWeight ? shared.of[slot][k / kPerLayer] : nullptr;
    return sums ? sums + sum_index * gradient_shape<T>(s, k).size() : nullptr;
  }

  // The sum of a layer's weight gradient while the thread's bands go by.
  struct WeightSum {
    int layer;
    T* data;     // at all points; null: not wanted
    bool fresh;  // nothing summed yet
    int64_t bands = 0;
  };

  // sum ← sum + vᵀ d at all points of a band
  void add(WeightSum& sum, Points<T> v, Points<T> d) {
    const int64_t points = v.band.window.points();
    const Matrix<T> to{sum.data, points * v.channels, d.channels};
    const auto add_point = [&](int64_t point, bool first) {
      multiply_point_transposed(v, d, point, to, sum.fresh && first);
    };
    if (shared.added[sum.layer]) {
      turns[sum.layer].go_round(add_point);
    } else {
      for (int64_t k = 0; k < points; ++k) add_point(k, true);
    }
    sum.fresh = false;
    ++sum.bands;
  }

  // After the thread's last band: if it had fewer than others, it passes its turns.
  void finish(WeightSum& sum, const Bands& bands) {
    if (!sum.data || !shared.added[sum.layer]) return;
    const int64_t most = bands.count(ceil_div(s.rows / (s.height * s.width), team.size));
    for (; sum.bands < most; ++sum.bands) turns[sum.layer].go_round([](int64_t, bool) {});
  }

  // out ← scale · Σ of the threads' sums, this thread's share; `sum` is the thread's own or its
  // crew's, the next thread's lies `stride` further on
  template <class S>
  void write(int k, S* out, Matrix<T> sum, int64_t stride, T scale) const {
    const bool in_turns = shared_sum(0, k);
    const int sums = in_turns ? team.crews(shared.threads) : team.size;
    if (in_turns) stride = sum.size();
    sum.data -= (in_turns ? sum_index : team.rank) * stride;
    if (k % kPerLayer == kWeight) {
      write_windows(k / kPerLayer, out, sum, stride, sums, scale);
    } else {
      reduce(out, sum, stride, sums, scale, Share(sum.rows, team.rank, team.size),
             Share::all(sum.panels()));
    }
  }

 private:
  const Stage& s;
  const SharedSums<T>& shared;
  const Team team;
  const Team adders;    // those who add to the same sums
  const int sum_index;  // which of them, if there are several
  Turns turns[kMaxLayers];

  Turns turns_of(int l) const {
    return {adders, kPoints, shared.added[l] ? shared.added[l] + sum_index * kPoints : nullptr};
  }

  // From sums at the points to torch's [out, in, size, size].
  template <class S>
  void write_windows(int l, S* to, Matrix<T> sum, int64_t stride, int sums, T scale) const {
    const auto& shape = s.convolutions[l];
    const int64_t in = shape.in, out = shape.out, taps = shape.size * shape.size;
    const int64_t points = window_of(s, l).points();
    const Share inputs(in, team.rank, team.size);
    for (int64_t j = 0; j < sum.panels(); ++j)
      for (int64_t i = inputs.begin; i < inputs.end; ++i)
        for (int c = 0; c < kPanel<T>; c += kLanes<T>) {
          Vec<T> u[kPoints], g[kMaxTaps];
          for (int64_t point = 0; point < points; ++point) {
            const T* const from = weights_at(sum, points, point).at(j, i) + c;
            u[point] = load(from);
            for (int t = 1; t < sums; ++t) u[point] += load(from + t * stride);
          }
          if (points == 1) {
            g[0] = u[0];
          } else {
            lower_window(u, g);
          }
          const int64_t first = j * kPanel<T> + c;
          for (int64_t o = first; o < min(out, first + kLanes<T>); ++o)
            for (int64_t t = 0; t < taps; ++t)
              narrow(scale * g[t][o - first], to[(o * in + i) * taps + t]);
        }
  }
};

}  // namespace
