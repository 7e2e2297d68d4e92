// What the threads know of all images together: the statistics of a layer's batch and the sums in
// its gradient. Each thread forms two sums per channel over its own images; the threads exchange
// them and each adds up all of them in the same order.

#pragma once

#include <algorithm>

#include "../../core/team.h"
#include "images.h"
#include "normalization.h"
#include "packing.h"

namespace {

template <class T>
class Statistics {
 public:
  // What the threads share: two halves, used in turns, of [threads, 2, channels].
  static double* shared_space(const Stage& s, const Tiling& tiling, Arena& arena) {
    return arena.take<double>(2 * tiling.threads * 2 * max_channels<T>(s));
  }

  Statistics(const Stage& s, double* shared) : s(s), shared(shared) {}

  void lay_out(Arena& arena) {
    first = arena.take<double>(2 * max_channels<T>(s));
    second = first + max_channels<T>(s);
  }

  // Where the statistics of the evaluations to come are written; null: nowhere.
  void record(void* statistics) { records = static_cast<T*>(statistics); }

  // This thread's sums of the layer in work, of either kind.
  Moments moments() const { return {first, second}; }
  Products products() const { return {first, second}; }
  void clear() const { std::fill_n(first, 2 * max_channels<T>(s), 0.0); }

  // bn ← the normalization of layer l: by the moments of all threads if by its batch, else by the
  // given statistics
  void finish_moments(const Layer<T>& layer, bool batch, int l, const Normalization<T>& bn,
                      Crew& crew) {
    const int64_t channels = s.convolutions[l].out;
    const double pixels = double(s.rows);
    if (!batch) {
      for (int64_t c = 0; c < padded<T>(channels); ++c)
        bn.set(c, layer.mean[c], layer.variance[c], s.epsilon);
    } else {
      double mean = 0, deviation = 0, count = 0;
      exchange(crew, padded<T>(channels),
               [&](int64_t c, int part, double other_mean, double other) {
                 if (part == 0) mean = deviation = count = 0;
                 const Share images(s.rows / (s.height * s.width), part, crew.team.size);
                 const double theirs = double((images.end - images.begin) * s.height * s.width);
                 Moments::merge(mean, deviation, count, other_mean, other, theirs);
                 count += theirs;
                 if (part + 1 < crew.team.size) return;
                 bn.set(c, mean, deviation / pixels, s.epsilon);
                 if (records && crew.team.rank == 0 && c < channels) {
                   records[c] = T(mean);
                   records[channels + c] = T(deviation / (pixels - 1));
                 }
               });
    }
    if (records) records += 2 * channels;
  }

  // From the products: ∇γ and ∇β, this thread's part of the sums, and k1 and k2, which are of all
  // threads
  void finish_products(bool batch, const Normalization<T>& bn, T* gamma, T* beta, bool fresh,
                       int64_t channels, Crew& crew) {
    for (int64_t c = 0; c < padded<T>(channels); ++c) {
      if (gamma) gamma[c] = T(second[c] * bn.root[c] + (fresh ? 0 : gamma[c]));
      if (beta) beta[c] = T(first[c] + (fresh ? 0 : beta[c]));
    }
    if (!batch) return;
    double plain = 0, centered = 0;
    exchange(crew, padded<T>(channels),
             [&](int64_t c, int part, double theirs, double their_centered) {
               if (part == 0) plain = centered = 0;
               plain += theirs;
               centered += their_centered;
               bn.k1[c] = T(plain / double(s.rows));
               bn.k2[c] = T(centered * bn.root[c] * bn.root[c] / double(s.rows));
             });
  }

 private:
  const Stage& s;
  double* const shared;
  double *first = nullptr, *second = nullptr;
  T* records = nullptr;
  int turn = 0;  // which half of `shared` is next

  // Publishes this thread's sums and calls f(channel, thread, its two sums) for all threads'.
  template <class F>
  void exchange(Crew& crew, int64_t channels, F f) {
    const int64_t row = max_channels<T>(s), each = 2 * row;
    double* const all = shared + turn * crew.team.size * each;
    turn ^= 1;  // the other half may still be read
    memcpy(all + crew.team.rank * each, first, each * sizeof(double));
    crew.meet();
    for (int64_t c = 0; c < channels; ++c)
      for (int part = 0; part < crew.team.size; ++part)
        f(c, part, all[part * each + c], all[part * each + row + c]);
  }
};

}  // namespace
