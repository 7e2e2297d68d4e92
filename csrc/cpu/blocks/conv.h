// The paper's convolutional blocks: a chain of layers, each σ, convolution, batch normalization.
//
//     u_0 = x,  z_l = W_l ∗ σ(u_{l−1}),  u_l = bn_l(z_l),  f(x) = u_L
//
// with L > 1; the paper's are
//
//     basic       L = 2, windows 3 × 3, 3 × 3
//     bottleneck  L = 3, windows 1 × 1, 3 × 3, 1 × 1
//
// The VJP, from dy_L = g down, with A_l = σ(u_{l−1}):
//
//     dz_l = bn_l's gradient of dy_l,   ∇W_l = A_lᵀ dz_l,   dy_{l−1} = (W_lᵀ ∗ dz_l) ⊙ σ'(u_{l−1})
//
// The statistics of a layer connect all images, so the threads meet once per layer and direction;
// everything else is local to an image. A thread takes its images a band at a time (Band) and keeps
// of each layer only z_l, and dy_l on the way back: normalization and σ are applied while a canvas
// is filled, statistics are taken and slopes multiplied in as a convolution leaves its results.
// Memory traffic per layer: z_{l−1} once in, z_l once out; on the way back dy_l, z_l and z_{l−1}
// once in, dy_{l−1} once out.

#pragma once

#include "../core/gemm.h"
#include "block.h"
#include "conv/normalization.h"
#include "conv/winograd.h"

namespace {

using resode::kMaxLayers;

template <class T>
class Conv {
 public:
  static constexpr int kAhead = 0;  // nobody gets ahead: threads meet in every layer
  static constexpr bool kWritesWhole = false;
  enum { Weight, Gamma, Beta, Mean, Variance, kPerLayer };

  // One layer's parameters, packed.
  struct Layer {
    Matrix<T> w, w_t;
    T *gamma, *beta, *mean, *variance;
  };
  struct Weights {
    const Layer* layers;
    bool batch[kMaxLayers];  // whether a layer normalizes by its batch
  };
  struct Trace {
    struct {
      T *z, *dy;
      Normalization<T> bn;
    } of[kMaxLayers];
  };

  // Packed weights are shared: for many channels they are large, and packing them is work.
  struct Shared {
    Layer layers[2][kMaxLayers];
    double* sums;  // two of [threads, 2, channels], used in turns
    Countdown* arrivals;
    // Large sums of weight gradients, if there are many threads: one for a crew, who add to it in
    // turns. Null: each thread has one of its own.
    T* gradients[2][kMaxLayers] = {};
    Countdown* added[kMaxLayers] = {};  // of each crew: how often, at each point
    int adding;                         // threads in a crew

    Shared(const Stage& s, const Tiling& tiling, Arena& arena, int slots, void* const* wanted) {
      const bool vjp = wanted;
      for (int slot = 0; slot < slots; ++slot)
        for (int l = 0; l < s.layers; ++l) {
          const int64_t in = s.convolutions[l].in, out = s.convolutions[l].out;
          Layer& layer = layers[slot][l];
          const int64_t points = window(s, l).points();
          layer.w = arena.matrix<T>(points * padded<T>(in), out);
          if (vjp) layer.w_t = arena.matrix<T>(points * padded<T>(out), in);
          for (T** vector : {&layer.gamma, &layer.beta, &layer.mean, &layer.variance})
            *vector = arena.take<T>(padded<T>(out));
        }
      sums = arena.take<double>(2 * tiling.threads * 2 * max_channels(s));
      arrivals = arena.take<Countdown>(tiling.threads);
      for (int t = 0; arena.real() && t < tiling.threads; ++t) arrivals[t].value = 0;

      adding = int(ceil_div(tiling.threads, kMaxSums));
      const int64_t crews = max(1, tiling.threads / adding);
      for (int l = 0; adding > 1 && l < s.layers; ++l) {
        const int64_t size = shape(s, l * kPerLayer + Weight).size();
        if (!is_wanted(s, wanted, l * kPerLayer + Weight) || window(s, l).points() != kPoints ||
            size * int64_t(sizeof(T)) < kLargeSum)
          continue;
        for (int slot = 0; slot < slots; ++slot) gradients[slot][l] = arena.take<T>(crews * size);
        added[l] = arena.take<Countdown>(crews * kPoints);
        for (int64_t i = 0; arena.real() && i < crews * kPoints; ++i) added[l][i].value = 0;
      }
    }

    // Sums of one block at most, and the bytes from which on they are large: a product then takes
    // so long that threads rarely wait for their turn. (With 2 threads and one sum a step took 4 to
    // 8 % longer, and each further sum of 256 channels is 8 MiB.)
    static constexpr int64_t kMaxSums = 4, kLargeSum = 1 << 20;
  };

  const Stage& s;

  static Tiling tiling(const Stage& s) { return Tiling::of_images(s); }

  Conv(const Stage& s, const Shared& shared, Team team)
      : s(s),
        shared(shared),
        crew(team, shared.arrivals),
        adders(team.crew(shared.adding)),
        sum_index(team.crew_index(shared.adding)),
        turns{turns_of(0), turns_of(1), turns_of(2)} {
    for (int l = 0; l < s.layers; ++l) {
      const int64_t in = s.convolutions[l].in, out = s.convolutions[l].out;
      bands[l] = Bands::of<T>(window(s, l), max(in, out));
    }
  }

  // The sum that this thread's crew adds the k-th gradient to; null: the thread has its own.
  T* shared_sum(int slot, int k) const {
    T* const sums = k % kPerLayer == Weight ? shared.gradients[slot][k / kPerLayer] : nullptr;
    return sums ? sums + sum_index * shape(k).size() : nullptr;
  }

  // A tile is one thread's.
  Share mine(Matrix<T> m) const { return Share::all(m.panels()); }
  void meet() const {}
  bool leads() const { return true; }

  // Where the statistics of the evaluations to come are written down.
  void record(void* statistics) { records = static_cast<T*>(statistics); }

  Matrix<T> shape(int k) const { return shape(s, k); }
  static Matrix<T> shape(const Stage& s, int k) {
    const int l = k / kPerLayer;
    const int64_t in = s.convolutions[l].in, out = s.convolutions[l].out;
    return {nullptr, k % kPerLayer == Weight ? window(s, l).points() * in : 1, out};
  }

  Weights weights(Arena&, int slot, bool) const { return {shared.layers[slot], {}}; }

  void pack_weights(Weights& w, int64_t n) {
    crew.meet();  // nobody needs what was there
    for (int l = 0; l < s.layers; ++l) w.batch[l] = !parameter<void>(n, l, Mean);
    with_storage<T>(s.storage, [&](auto storage) {
      for (int l = 0; l < s.layers; ++l) pack_layer<decltype(storage)>(w.layers[l], n, l);
    });
    crew.meet();
  }

  Trace trace_space(Arena& arena, int64_t rows, bool vjp) {
    Trace t{};
    for (int l = 0; l < s.layers; ++l) {
      const int64_t out = padded<T>(s.convolutions[l].out);
      t.of[l].z = arena.take<T>(rows * out);
      if (vjp && l + 1 < s.layers) t.of[l].dy = arena.take<T>(rows * out);
      Normalization<T>& bn = t.of[l].bn;
      for (T** vector : {&bn.mean, &bn.root, &bn.scale, &bn.shift, &bn.k1, &bn.k2})
        *vector = arena.take<T>(out);
    }
    if (!left) tools(arena, vjp);
    return t;
  }

  void trace(const Weights& w, Matrix<T> p, Trace& t, bool) {
    Matrix<T> input = p;
    for (int l = 0; l < s.layers; ++l) {
      auto& to = t.of[l];
      to.bn.gamma = w.layers[l].gamma;
      to.bn.beta = w.layers[l].beta;
      const int64_t out = s.convolutions[l].out;
      std::fill_n(moments.mean, 2 * max_channels(s), 0.0);
      int64_t seen = 0;
      with_activation(s.activation, [&](auto activation) {
        const auto activated = input_of<decltype(activation)>(t, l);
        bands[l].for_each(p.rows / (s.height * s.width), [&](Band b) {
          const Canvas<T> a = paint(activated, input, b);
          convolve(a, w.layers[l].w, [&](int64_t j, Points<T> m) {
            T* const z = to.z + (j * p.rows + b.begin()) * kPanel<T>;
            synthesise(m, j, z);
            if (w.batch[l]) moments.add(j * kPanel<T>, z, b.pixels(), seen);
          });
          seen += b.pixels();
        });
      });
      finish_statistics(w, l, to.bn);
      input = {to.z, p.rows, out};
    }
  }

  void output(const Weights&, const Trace& t, int64_t rows, Update<T> update) const {
    const auto& last = t.of[s.layers - 1];
    for (int64_t j = 0; j < ceil_div(s.dim, kPanel<T>); ++j) {
      using V = PanelRow<T>;
      const V a = load_all<V>(last.bn.scale + j * kPanel<T>);
      const V b = load_all<V>(last.bn.shift + j * kPanel<T>);
      for_each_pixel<T>(j * rows * kPanel<T>, rows, [&](int64_t at) RESODE_ALWAYS {
        apply(update, at, load_all<V>(last.z + at) * a + b);
      });
    }
  }

  void vjp(const Weights& w, Matrix<T> p, Trace& t, Matrix<T> g, const Gradient<T>& sum,
           Update<T> update) {
    with_activation(s.activation, [&](auto activation) {
      int l = s.layers - 1;
      while (vjp_layer<decltype(activation)>(w, p, t, g, sum, update, l) && l > 0) --l;
    });
  }

  // Σ of the threads' sums; for a weight at the points, to torch's [out, in, size, size].
  template <class S>
  void write_gradient(int k, S* to, Matrix<T> sum, int64_t stride, T scale) const {
    const Team team = crew.team;
    const bool in_turns = shared_sum(0, k);
    const int sums = in_turns ? team.crews(shared.adding) : team.size;
    if (in_turns) stride = sum.size();
    sum.data -= (in_turns ? sum_index : team.rank) * stride;
    if (k % kPerLayer != Weight)
      return reduce(to, sum, stride, sums, scale, Share(sum.rows, team.rank, team.size),
                    Share::all(sum.panels()));
    const auto& shape = s.convolutions[k / kPerLayer];
    const int64_t in = shape.in, out = shape.out, taps = shape.size * shape.size;
    const int64_t points = window(s, k / kPerLayer).points();
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

 private:
  const Shared& shared;
  Crew crew;
  Bands bands[kMaxLayers];
  const Team adders;    // those who add to the same sums
  const int sum_index;  // which of them, if there are several
  Turns turns[kMaxLayers];
  T* pixels = nullptr;                  // of a canvas
  T *left = nullptr, *right = nullptr;  // points
  T* scratch = nullptr;                 // a panel of a band
  Moments moments{};                    // of the layer in work; Products take the same room
  T* records = nullptr;
  int turn = 0;  // which half of shared.sums is next

  Turns turns_of(int l) const {
    return {adders, kPoints, shared.added[l] ? shared.added[l] + sum_index * kPoints : nullptr};
  }

  static int64_t max_channels(const Stage& s) {
    int64_t channels = 0;
    for (int l = 0; l < s.layers; ++l) channels = max(channels, s.convolutions[l].out);
    return padded<T>(channels);
  }

  static Window window(const Stage& s, int l) {
    return {s.height, s.width, s.convolutions[l].size};
  }

  void tools(Arena& arena, bool vjp) {
    int64_t canvas = 0, points = 0;
    for (int l = 0; l < s.layers; ++l) {
      const int64_t channels = max(s.convolutions[l].in, s.convolutions[l].out);
      canvas = max(canvas, Canvas<T>{nullptr, bands[l].largest, channels}.size());
      points = max(points, Points<T>{nullptr, bands[l].largest, channels}.size());
    }
    pixels = arena.take<T>(canvas);
    left = arena.take<T>(points);
    right = arena.take<T>(points);
    if (vjp) scratch = arena.take<T>(bands[0].largest.pixels() * kPanel<T>);
    moments.mean = arena.take<double>(2 * max_channels(s));
    moments.deviation = moments.mean + max_channels(s);
  }

  template <class S>
  const S* parameter(int64_t n, int l, int which) const {
    return static_cast<const S*>(s.parameters[n * s.count + l * kPerLayer + which]);
  }

  // One worker's share of a layer; the vectors are everyone's.
  template <class S>
  void pack_layer(const Layer& to, int64_t n, int l) const {
    pack_windows(to, parameter<S>(n, l, Weight), l);
    if (crew.team.rank > 0) return;
    const int64_t out = s.convolutions[l].out;
    const auto vector = [&](T* v, int which, T otherwise) {
      const S* from = parameter<S>(n, l, which);
      for (int64_t c = 0; c < padded<T>(out); ++c)
        v[c] = c >= out ? T(0) : from ? T(widen(from[c])) : otherwise;
    };
    vector(to.gamma, Gamma, 1);
    vector(to.beta, Beta, 0);
    vector(to.mean, Mean, 0);
    vector(to.variance, Variance, 1);
  }

  // Windows at all points, a square of outputs × inputs at a time: lanes are inputs where windows
  // are read and in w_t, and outputs in w.
  template <class S>
  void pack_windows(const Layer& to, const S* windows, int l) const {
    constexpr int L = kLanes<T>;
    const auto& shape = s.convolutions[l];
    const int64_t points = window(s, l).points();
    const int64_t across = padded<T>(shape.in) / L, down = padded<T>(shape.out) / L;
    const Share share(across * down, crew.team.rank, crew.team.size);
    for (int64_t square = share.begin; square < share.end; ++square) {
      const int64_t o = square / across * L, i = square % across * L;
      Vec<T> u[kPoints][L];
      for (int k = 0; k < L; ++k) {
        Vec<T> g[kMaxTaps] = {}, lifted[kPoints] = {};
        if (o + k < shape.out) {
          read_windows<T>(windows, shape, o + k, i, g);
          if (points == 1) {
            lifted[0] = g[0];
          } else {
            lift_window(g, lifted);
          }
        }
        for (int64_t point = 0; point < points; ++point) u[point][k] = lifted[point];
      }
      for (int64_t point = 0; point < points; ++point) {
        if (to.w_t.data) {
          const Matrix<T> turned = weights_at(to.w_t, points, points == 1 ? 0 : turn_point(point));
          for (int k = 0; k < L; ++k)
            store(turned.at(i / kPanel<T>, o + k) + i % kPanel<T>, u[point][k]);
        }
        transpose<T>(u[point]);
        const Matrix<T> plain = weights_at(to.w, points, point);
        for (int k = 0; k < L; ++k)
          store(plain.at(o / kPanel<T>, i + k) + o % kPanel<T>, u[point][k]);
      }
    }
  }

  // use(j, m) for every output panel j, with m the points of A ∗ W
  template <class Use>
  void convolve(Canvas<T> a, Matrix<T> w, Use use) const {
    const Points<T> v{left, a.band, a.channels}, m{right, a.band, w.columns};
    analyse(a, v);
    multiply_points(v, w, m);
    for (int64_t j = 0; j < w.panels(); ++j) use(j, m);
  }

  // What stands before layer l's convolution: σ of the input, or of the layer before, normalized.
  template <class Act>
  static Activated<T, Act> input_of(const Trace& t, int l) {
    if (l == 0) return {nullptr, nullptr};
    return {t.of[l - 1].bn.scale, t.of[l - 1].bn.shift};
  }

  template <class Act>
  Canvas<T> paint(Activated<T, Act> activated, Matrix<T> from, Band b) const {
    const Canvas<T> canvas{pixels, b, from.columns};
    canvas.fill([&](int64_t j, int64_t pixel, T* to) RESODE_ALWAYS {
      const auto panel = activated.panel(j);
      const int64_t offset = (j * from.rows + pixel) * kPanel<T>;
      to -= offset;
      for_each_pixel<T>(offset, s.width, [&](int64_t at) RESODE_ALWAYS {
        PanelRow<T> value, slope;
        panel(load_all<PanelRow<T>>(from.data + at), value, slope);
        store_all(to + at, value);
      });
    });
    return canvas;
  }

  // Publishes this thread's two rows of sums and calls f(channel, thread's pair) for all threads'.
  template <class F>
  void exchange(int64_t channels, F f) {
    const int64_t row = max_channels(s), each = 2 * row;
    double* const all = shared.sums + turn * crew.team.size * each;
    turn ^= 1;  // the other half may still be read
    memcpy(all + crew.team.rank * each, moments.mean, each * sizeof(double));
    crew.meet();
    for (int64_t c = 0; c < channels; ++c)
      for (int part = 0; part < crew.team.size; ++part)
        f(c, part, all[part * each + c], all[part * each + row + c]);
  }

  void finish_statistics(const Weights& w, int l, const Normalization<T>& bn) {
    const Layer& layer = w.layers[l];
    const int64_t channels = s.convolutions[l].out;
    const double pixels = double(s.rows);
    if (!w.batch[l]) {
      for (int64_t c = 0; c < padded<T>(channels); ++c)
        bn.set(c, layer.mean[c], layer.variance[c], s.epsilon);
    } else {
      double mean = 0, deviation = 0, count = 0;
      exchange(padded<T>(channels), [&](int64_t c, int part, double other_mean, double other) {
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

  // Returns whether anything before the layer is wanted.
  template <class Act>
  bool vjp_layer(const Weights& w, Matrix<T> p, Trace& t, Matrix<T> g, const Gradient<T>& sum,
                 Update<T> update, int l) {
    const int64_t in = s.convolutions[l].in, out = s.convolutions[l].out;
    const Layer& layer = w.layers[l];
    auto& at = t.of[l];
    const T* const dy = l + 1 == s.layers ? g.data : at.dy;
    const Products products{moments.mean, moments.deviation};
    if (l + 1 == s.layers) {
      std::fill_n(products.plain, 2 * max_channels(s), 0.0);
      for (int64_t j = 0; j < ceil_div(out, kPanel<T>); ++j) {
        const int64_t offset = j * p.rows * kPanel<T>;
        products.add(j * kPanel<T>, dy + offset, at.z + offset, at.bn.mean, p.rows);
      }
    }
    finish_products(w.batch[l], at.bn, sum.of[l * kPerLayer + Gamma].data,
                    sum.of[l * kPerLayer + Beta].data, sum.fresh, out);

    T* const weight_sum = sum.of[l * kPerLayer + Weight].data;
    bool below = !update.empty();
    for (int k = 0; k < l * kPerLayer; ++k) below = below || sum.of[k].data;
    if (!weight_sum && !below) return false;

    const Matrix<T> input{l == 0 ? p.data : t.of[l - 1].z, p.rows, in};
    const auto activated = input_of<Act>(t, l);
    const NormalizedGradient<T> gradient{dy, at.z, at.bn, w.batch[l]};
    if (l > 0) std::fill_n(products.plain, 2 * max_channels(s), 0.0);
    bool fresh = sum.fresh;
    int64_t rounds = 0;
    const auto add_products = [&](Points<T> v, Points<T> d) {
      const Matrix<T> to{weight_sum, v.band.window.points() * in, out};
      const auto add = [&](int64_t point, bool first) {
        multiply_point_transposed(v, d, point, to, fresh && first);
      };
      if (shared.added[l]) {
        turns[l].go_round(add);
      } else {
        for (int64_t k = 0; k < v.band.window.points(); ++k) add(k, true);
      }
      fresh = false;
      ++rounds;
    };
    bands[l].for_each(p.rows / (s.height * s.width), [&](Band b) {
      const auto paint_dz = [&](int64_t j, int64_t pixel, T* to) RESODE_ALWAYS {
        gradient(j, (j * p.rows + pixel) * kPanel<T>, to, s.width);
      };
      const Canvas<T> dz{pixels, b, out};
      if (weight_sum) {
        const Points<T> v{left, b, in}, d{right, b, out};
        analyse(paint(activated, input, b), v);
        dz.fill(paint_dz);
        spread(dz, d);
        add_products(v, d);
      } else {
        dz.fill(paint_dz);
      }
      if (!below) return;
      convolve(dz, layer.w_t, [&](int64_t j, Points<T> m) {
        const int64_t offset = (j * p.rows + b.begin()) * kPanel<T>;
        T* const da = l == 0 ? scratch : t.of[l - 1].dy + offset;
        synthesise(m, j, da);
        times_slope(activated.panel(j), input.data + offset, b.pixels(), da);
        if (l == 0) {
          for_each_pixel<T>(0, b.pixels(), [&](int64_t at) RESODE_ALWAYS {
            apply(update, offset + at, load_all<PanelRow<T>>(da + at));
          });
        } else {
          products.add(j * kPanel<T>, da, input.data + offset, t.of[l - 1].bn.mean, b.pixels());
        }
      });
    });
    // A thread with fewer bands than others passes its turn.
    if (weight_sum && shared.added[l]) {
      const int64_t images = ceil_div(s.rows / (s.height * s.width), crew.team.size);
      for (; rounds < bands[l].count(images); ++rounds) turns[l].go_round([](int64_t, bool) {});
    }
    return below;
  }

  // da ← da ⊙ σ'(u), with z where u is computed from
  template <class Panel>
  static void times_slope(Panel activated, const T* z, int64_t pixels, T* da) {
    for_each_pixel<T>(0, pixels, [&](int64_t at) RESODE_ALWAYS {
      PanelRow<T> value, slope;
      activated(load_all<PanelRow<T>>(z + at), value, slope);
      store_all(da + at, load_all<PanelRow<T>>(da + at) * slope);
    });
  }

  // ∇γ, ∇β (this thread's part) and k1, k2 (everyone's)
  void finish_products(bool batch, const Normalization<T>& bn, T* gamma, T* beta, bool fresh,
                       int64_t channels) {
    for (int64_t c = 0; c < padded<T>(channels); ++c) {
      if (gamma) gamma[c] = T(moments.deviation[c] * bn.root[c] + (fresh ? 0 : gamma[c]));
      if (beta) beta[c] = T(moments.mean[c] + (fresh ? 0 : beta[c]));
    }
    if (!batch) return;
    double plain = 0, centered = 0;
    exchange(padded<T>(channels), [&](int64_t c, int part, double theirs, double their_centered) {
      if (part == 0) plain = centered = 0;
      plain += theirs;
      centered += their_centered;
      bn.k1[c] = T(plain / double(s.rows));
      bn.k2[c] = T(centered * bn.root[c] * bn.root[c] / double(s.rows));
    });
  }
};

static_assert(ResidualBlock<Conv<float>, float> && ResidualBlock<Conv<double>, double>);

}  // namespace
