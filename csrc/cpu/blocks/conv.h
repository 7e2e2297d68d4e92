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
// is filled, statistics are taken and slopes multiplied in while the results of a convolution are
// written. Memory traffic per layer: z_{l−1} once in, z_l once out; on the way back dy_l, z_l and
// z_{l−1} once in, dy_{l−1} once out.

#pragma once

#include "conv/gradients.h"
#include "conv/statistics.h"

namespace {

template <class T>
class Conv {
 public:
  static constexpr int kAhead = 0;  // the threads meet in every layer
  static constexpr bool kWritesWhole = false;

  struct Weights {
    const Layer<T>* layers;
    bool batch[kMaxLayers];  // whether a layer normalizes by its batch
  };
  struct Trace {
    struct {
      T *z, *dy;
      Normalization<T> bn;
    } of[kMaxLayers];
    EvaluationSigns signs;
  };

  // Packed weights are shared: for many channels they are large, and packing them is work.
  struct Shared {
    Layer<T> layers[2][kMaxLayers];
    double* statistics;
    Countdown* arrivals;
    SharedSums<T> sums;

    Shared(const Stage& s, const Tiling& tiling, Arena& arena, int slots, void* const* wanted) {
      for (int slot = 0; slot < slots; ++slot)
        for (int l = 0; l < s.layers; ++l) layers[slot][l] = Layer<T>(s, l, arena, wanted);
      statistics = Statistics<T>::shared_space(s, tiling, arena);
      arrivals = arena.take<Countdown>(tiling.threads);
      for (int t = 0; arena.real() && t < tiling.threads; ++t) arrivals[t].value = 0;
      sums = SharedSums<T>(s, tiling, arena, slots, wanted);
    }
  };

  const Stage& s;

  static Tiling tiling(const Stage& s) { return Tiling::of_images(s); }

  Conv(const Stage& s, const Shared& shared, Team team)
      : s(s),
        shared(shared),
        crew(team, shared.arrivals),
        statistics(s, shared.statistics),
        gradients(s, shared.sums, team) {
    for (int l = 0; l < s.layers; ++l) {
      const int64_t in = s.convolutions[l].in, out = s.convolutions[l].out;
      bands[l] = Bands::of<T>(window_of(s, l), max(in, out));
    }
  }

  // A tile is one thread's.
  Share share(int64_t count) const { return Share::all(count); }
  Share mine(Matrix<T> m) const { return share(m.panels()); }
  void meet() const {}
  bool leads() const { return true; }

  void record(void* records) { statistics.record(records); }

  Matrix<T> shape(int k) const { return gradient_shape<T>(s, k); }
  T* shared_sum(int slot, int k) const { return gradients.shared_sum(slot, k); }
  template <class S>
  void write_gradient(int k, S* out, Matrix<T> sum, int64_t stride, T scale) const {
    gradients.write(k, out, sum, stride, scale);
  }

  Weights weights(Arena&, int slot, bool) const { return {shared.layers[slot], {}}; }

  void pack_weights(Weights& w, int64_t n) {
    crew.meet();  // no thread needs the weights that were there
    for (int l = 0; l < s.layers; ++l) w.batch[l] = !layer_parameter<void>(s, n, l, kMean);
    with_storage<T>(s.storage, [&](auto storage) {
      for (int l = 0; l < s.layers; ++l)
        pack_layer<decltype(storage)>(w.layers[l], s, n, l, crew.team);
    });
    crew.meet();
  }

  Trace trace_space(Arena& arena, int64_t rows, bool vjp) {
    Trace t{};
    for (int l = 0; l < s.layers; ++l) {
      const int64_t out = s.convolutions[l].out;
      t.of[l].z = arena.take<T>(rows * padded<T>(out));
      if (vjp && l + 1 < s.layers) t.of[l].dy = arena.take<T>(rows * padded<T>(out));
      t.of[l].bn = Normalization<T>::lay_out(arena, out);
    }
    if (!left) lay_out_buffers(arena, vjp);
    return t;
  }

  void trace(const Weights& w, Matrix<T> p, Trace& t, bool, EvaluationSigns signs) {
    t.signs = signs;
    Matrix<T> input = p;
    for (int l = 0; l < s.layers; ++l) {
      auto& to = t.of[l];
      to.bn.gamma = w.layers[l].gamma;
      to.bn.beta = w.layers[l].beta;
      const int64_t out = s.convolutions[l].out;
      statistics.clear();
      int64_t seen = 0;
      with_activation(s.activation, [&](auto activation) {
        const auto activated = input_of<decltype(activation)>(t, l);
        bands[l].for_each(p.rows / (s.height * s.width), [&](Band b) {
          const Canvas<T> a = paint(activated, input, b);
          convolve(a, w.layers[l].w, [&](int64_t j, Points<T> m) {
            T* const z = to.z + (j * p.rows + b.begin()) * kPanel<T>;
            synthesise(m, j, z);
            if (w.batch[l]) statistics.moments().add(j * kPanel<T>, z, b.pixels(), seen);
          });
          seen += b.pixels();
        });
      });
      statistics.finish_moments(w.layers[l], w.batch[l], l, to.bn, crew);
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

 private:
  const Shared& shared;
  Crew crew;
  Statistics<T> statistics;
  Gradients<T> gradients;
  Bands bands[kMaxLayers];
  T* pixels = nullptr;                  // of a canvas
  T *left = nullptr, *right = nullptr;  // points
  T* scratch = nullptr;                 // a panel of a band

  void lay_out_buffers(Arena& arena, bool vjp) {
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
    statistics.lay_out(arena);
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
  Activated<T, Act> input_of(const Trace& t, int l) const {
    int64_t before = 0;  // the signs of the layers before
    for (int i = 0; i < l; ++i) before += s.rows * sign_bytes(s.convolutions[i].in);
    const Signs signs = t.signs.of(s.convolutions[l].in, before);
    if (l == 0) return {nullptr, nullptr, signs};
    return {t.of[l - 1].bn.scale, t.of[l - 1].bn.shift, signs};
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
        panel(load_all<PanelRow<T>>(from.data + at), at / kPanel<T> - j * from.rows, value, slope);
        store_all(to + at, value);
      });
    });
    return canvas;
  }

  // Returns whether anything before the layer is wanted.
  template <class Act>
  bool vjp_layer(const Weights& w, Matrix<T> p, Trace& t, Matrix<T> g, const Gradient<T>& sum,
                 Update<T> update, int l) {
    const int64_t in = s.convolutions[l].in, out = s.convolutions[l].out;
    const Layer<T>& layer = w.layers[l];
    auto& at = t.of[l];
    const T* const dy = l + 1 == s.layers ? g.data : at.dy;
    const Products products = statistics.products();
    if (l + 1 == s.layers) {
      statistics.clear();
      for (int64_t j = 0; j < ceil_div(out, kPanel<T>); ++j) {
        const int64_t offset = j * p.rows * kPanel<T>;
        products.add(j * kPanel<T>, dy + offset, at.z + offset, at.bn.mean, p.rows);
      }
    }
    statistics.finish_products(w.batch[l], at.bn, sum.of[l * kPerLayer + kGamma].data,
                               sum.of[l * kPerLayer + kBeta].data, sum.fresh, out, crew);

    typename Gradients<T>::WeightSum weight_sum{l, sum.of[l * kPerLayer + kWeight].data, sum.fresh};
    bool below = !update.empty();
    for (int k = 0; k < l * kPerLayer; ++k) below = below || sum.of[k].data;
    if (!weight_sum.data && !below) return false;

    const Matrix<T> input{l == 0 ? p.data : t.of[l - 1].z, p.rows, in};
    const auto activated = input_of<Act>(t, l);
    const NormalizedGradient<T> gradient{dy, at.z, at.bn, w.batch[l]};
    if (l > 0) statistics.clear();
    bands[l].for_each(p.rows / (s.height * s.width), [&](Band b) {
      const auto paint_dz = [&](int64_t j, int64_t pixel, T* to) RESODE_ALWAYS {
        gradient(j, (j * p.rows + pixel) * kPanel<T>, to, s.width);
      };
      const Canvas<T> dz{pixels, b, out};
      if (weight_sum.data) {
        const Points<T> v{left, b, in}, d{right, b, out};
        analyse(paint(activated, input, b), v);
        dz.fill(paint_dz);
        spread(dz, d);
        gradients.add(weight_sum, v, d);
      } else {
        dz.fill(paint_dz);
      }
      if (!below) return;
      convolve(dz, layer.w_t, [&](int64_t j, Points<T> m) {
        const int64_t offset = (j * p.rows + b.begin()) * kPanel<T>;
        T* const da = l == 0 ? scratch : t.of[l - 1].dy + offset;
        synthesise(m, j, da);
        times_slope(activated.panel(j), input.data + offset, b.begin(), b.pixels(), da);
        if (l == 0) {
          for_each_pixel<T>(0, b.pixels(), [&](int64_t at) RESODE_ALWAYS {
            apply(update, offset + at, load_all<PanelRow<T>>(da + at));
          });
        } else {
          products.add(j * kPanel<T>, da, input.data + offset, t.of[l - 1].bn.mean, b.pixels());
        }
      });
    });
    gradients.finish(weight_sum, bands[l]);
    return below;
  }
};

static_assert(ResidualBlock<Conv<float>, float> && ResidualBlock<Conv<double>, double>);

}  // namespace
