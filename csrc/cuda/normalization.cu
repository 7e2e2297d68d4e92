// Batch normalization with the activation around it, and its VJP.
//
// The m values of a channel share mean μ, variance v, γ and β (absent: 1 and 0). r = 1/√(v + ε):
//
//   statistics          μ = Σ z / m,  v = Σ (z − μ)² / m
//                       reads z
//   normalize           ẑ = (z − μ) r,  u = γ ẑ + β,  a = σ(u)
//                       reads z, writes a
//   normalization_vjp   g = d · σ'(u),  dβ = Σ g,  dγ = Σ g ẑ,
//                       dz = γ r (g − (dβ + ẑ dγ)/m), or γ r g if μ and v are given
//                       reads d and z twice, writes dz
//
// u, a and g are computed again from z wherever they are needed: only z is kept between the passes.

#include "activate.h"
#include "layerwise.h"
#include "reduce.h"

namespace resode {

// ------------------------------------------------------------------------------------ statistics

namespace {

// Of some values: their number, their mean and Σ (z − mean)². Joined by Chan's formula; Σ z² − m μ²
// would cancel where the mean is large. For the same reason they are taken of z − z₀ with a value
// z₀ of the channel, its first.
struct Moments {
  float count = 0, mean = 0, squares = 0;

  __device__ __forceinline__ void add(const Moments& other) {
    const float total = count + other.count;
    const float share = other.count > 0 ? other.count / total : 0;
    const float delta = other.mean - mean;
    squares += other.squares + delta * delta * (count * share);
    mean += delta * share;
    count = total;
  }
};

template <int V>
__global__ void __launch_bounds__(kThreads)
    partial_statistics_kernel(Moments* partials, Array z, const Tiles tiles) {
  const Part<V> part(tiles);
  float first[V] = {};
  if (part.inside()) gather(z, part.offset(0, 0), part.channel_stride, 0, first);
  Moments moments[V];
  part.for_each([&](int64_t i) {
    float value[V];
    read(z, i, value);
    const float count = moments[0].count + 1, share = 1 / count;
#pragma unroll
    for (int k = 0; k < V; ++k) {  // Chan's formula for one value more
      value[k] -= first[k];
      const float delta = value[k] - moments[k].mean;
      moments[k].count = count;
      moments[k].mean += delta * share;
      moments[k].squares += delta * (value[k] - moments[k].mean);
    }
  });
  write_partials(partials, moments, part);
}

__global__ void __launch_bounds__(kThreads)
    join_statistics_kernel(float* mean, float* variance, const Moments* partials, int programs,
                           Array z, const Rows rows) {
  const Joined<Moments> joined(partials, programs, rows.channels);
  if (!joined.here) return;
  float first[1];
  gather(z, joined.channel * (rows.channels_adjoin ? 1 : rows.positions), 0, 0, first);
  mean[joined.channel] = first[0] + joined.total[0].mean;
  variance[joined.channel] = joined.total[0].squares / joined.total[0].count;
}

}  // namespace

size_t statistics(const Gpu& gpu, const Rows& rows, Array z, float* mean, float* variance,
                  int programs, void* workspace) {
  const Tiles tiles(rows, lanes_of(rows.adjoining(), {z}));
  const dim3 grid = tiles.grid(programs);
  if (!workspace) return sizeof(Moments) * grid.x * rows.channels;
  auto* partials = static_cast<Moments*>(workspace);
  with_lanes(tiles.lanes, [&](auto lanes) {
    launch(gpu, partial_statistics_kernel<lanes.value>, grid, kThreads,
           sizeof(Moments) * kThreads * lanes.value, partials, z, tiles);
  });
  launch(gpu, join_statistics_kernel, join_grid(rows), kThreads, sizeof(Moments) * kThreads, mean,
         variance, partials, int(grid.x), z, rows);
  return 0;
}

// ----------------------------------------------------------------------------------- normalizing

namespace {

// The normalization of the thread's channels. r is rounded correctly: all values of a channel
// share its error.
template <int V>
struct Normalizer {
  float mean[V], r[V], gamma[V], beta[V];

  __device__ __forceinline__ Normalizer(const Normalization& normalization, const Part<V>& part) {
    gather(normalization.mean, part.channel, part.channel_stride, 0, mean);
    gather(normalization.variance, part.channel, part.channel_stride, 1, r);
    gather(normalization.gamma, part.channel, part.channel_stride, 1, gamma);
    gather(normalization.beta, part.channel, part.channel_stride, 0, beta);
#pragma unroll
    for (int k = 0; k < V; ++k) r[k] = 1 / sqrtf(r[k] + normalization.epsilon);
  }

  // ẑ and u of the values from i on
  __device__ __forceinline__ void apply(const Array& z, int64_t i, float (&normal)[V],
                                        float (&u)[V]) const {
    read(z, i, normal);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      normal[k] = (normal[k] - mean[k]) * r[k];
      u[k] = gamma[k] * normal[k] + beta[k];
    }
  }
};

template <int V>
__global__ void __launch_bounds__(kThreads)
    normalize_kernel(Array out, Array z, const Normalization normalization, Activation activation,
                     const Tiles tiles) {
  const Part<V> part(tiles);
  if (!part.inside()) return;
  const Normalizer<V> normalizer(normalization, part);
  part.for_each([&](int64_t i) {
    float normal[V], u[V], value[V], slope[V];
    normalizer.apply(z, i, normal, u);
    activate(activation, u, value, slope);
    write(out, i, value);
  });
}

}  // namespace

void normalize(const Gpu& gpu, const Rows& rows, Array out, Array z,
               const Normalization& normalization, Activation activation) {
  const Tiles tiles(rows, lanes_of(rows.adjoining(), {out, z}));
  with_lanes(tiles.lanes, [&](auto lanes) {
    launch(gpu, normalize_kernel<lanes.value>, tiles.grid(gpu), kThreads, 0, out, z, normalization,
           activation, tiles);
  });
}

// ------------------------------------------------------------------------------------------- VJP

namespace {

// Σ g and Σ g ẑ
struct Sums {
  float g = 0, product = 0;

  __device__ __forceinline__ void add(const Sums& other) {
    g += other.g;
    product += other.product;
  }
};

// ẑ and g of the values from i on
template <int V>
__device__ __forceinline__ void linearize(const Normalizer<V>& normalizer, const Array& d,
                                          const Array& z, Activation activation, int64_t i,
                                          float (&normal)[V], float (&g)[V]) {
  float u[V], value[V], slope[V];
  normalizer.apply(z, i, normal, u);
  activate(activation, u, value, slope);
  read(d, i, g);
#pragma unroll
  for (int k = 0; k < V; ++k) g[k] *= slope[k];
}

template <int V>
__global__ void __launch_bounds__(kThreads)
    partial_sums_kernel(Sums* partials, Array d, Array z, const Normalization normalization,
                        Activation activation, const Tiles tiles) {
  const Part<V> part(tiles);
  Sums sums[V];
  if (part.inside()) {
    const Normalizer<V> normalizer(normalization, part);
    part.for_each([&](int64_t i) {
      float normal[V], g[V];
      linearize(normalizer, d, z, activation, i, normal, g);
#pragma unroll
      for (int k = 0; k < V; ++k) sums[k].add({g[k], g[k] * normal[k]});
    });
  }
  write_partials(partials, sums, part);
}

__global__ void __launch_bounds__(kThreads)
    join_sums_kernel(float* d_gamma, float* d_beta, const Sums* partials, int programs,
                     int64_t channels) {
  const Joined<Sums> joined(partials, programs, channels);
  if (!joined.here) return;
  d_gamma[joined.channel] = joined.total[0].product;
  d_beta[joined.channel] = joined.total[0].g;
}

// dz = γ r (g − (dβ + ẑ dγ)/m); an absent dβ and dγ count as 0
template <int V>
__global__ void __launch_bounds__(kThreads)
    vjp_kernel(Array dz, Array d_gamma, Array d_beta, Array d, Array z,
               const Normalization normalization, Activation activation, const Tiles tiles) {
  const Part<V> part(tiles);
  if (!part.inside()) return;
  const Normalizer<V> normalizer(normalization, part);
  const float m = float(tiles.rows.groups * tiles.rows.positions);
  float mean_g[V], mean_product[V];
  gather(d_beta, part.channel, part.channel_stride, 0, mean_g);
  gather(d_gamma, part.channel, part.channel_stride, 0, mean_product);
#pragma unroll
  for (int k = 0; k < V; ++k) mean_g[k] /= m, mean_product[k] /= m;
  part.for_each([&](int64_t i) {
    float normal[V], g[V];
    linearize(normalizer, d, z, activation, i, normal, g);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      g[k] -= mean_g[k] + normal[k] * mean_product[k];
      g[k] *= normalizer.gamma[k] * normalizer.r[k];
    }
    write(dz, i, g);
  });
}

}  // namespace

size_t normalization_vjp(const Gpu& gpu, const Rows& rows, Array dz, float* d_gamma, float* d_beta,
                         Array d, Array z, const Normalization& normalization, bool of_batch,
                         Activation activation, int programs, void* workspace) {
  const Tiles tiles(rows, lanes_of(rows.adjoining(), {dz, d, z}));
  const dim3 grid = tiles.grid(programs);
  if (!workspace) return sizeof(Sums) * grid.x * rows.channels;
  auto* partials = static_cast<Sums*>(workspace);
  with_lanes(tiles.lanes, [&](auto lanes) {
    launch(gpu, partial_sums_kernel<lanes.value>, grid, kThreads,
           sizeof(Sums) * kThreads * lanes.value, partials, d, z, normalization, activation, tiles);
  });
  launch(gpu, join_sums_kernel, join_grid(rows), kThreads, sizeof(Sums) * kThreads, d_gamma, d_beta,
         partials, int(grid.x), rows.channels);
  with_lanes(tiles.lanes, [&](auto lanes) {
    launch(gpu, vjp_kernel<lanes.value>, tiles.grid(gpu), kThreads, 0, dz,
           Array{of_batch ? d_gamma : nullptr, DType::float32},
           Array{of_batch ? d_beta : nullptr, DType::float32}, d, z, normalization, activation,
           tiles);
  });
  return 0;
}

}  // namespace resode
