// Updates of states, and bias with activation, each in one pass over memory.
//
//   combine            Σ a_i y_i, where a y_i may come as a product d · σ'(x)
//                      reads every tensor once, writes one in float32
//   apply_activation   σ(z + b), or d · σ'(z + b)
//                      reads z (and d), writes one
//
// Arithmetic is in float32.

#include "activate.h"
#include "layerwise.h"
#include "tiles.h"

namespace resode {

// --------------------------------------------------------------------------------------- combine

namespace {

struct Sum {
  Array out;
  int64_t elements;
  int count;
  Term terms[kMaxTerms];
};

// out = Σ a_i y_i σ'(x_i), without σ' where there is no x_i: V numbers from i on
template <int V>
__device__ __forceinline__ void add_up(const Sum& sum, int64_t i) {
  float total[V] = {};
#pragma unroll 1
  for (int n = 0; n < sum.count; ++n) {
    const Term& term = sum.terms[n];
    float y[V];
    read(term.y, i, y);
    if (term.x.at) {
      float x[V], value[V], slope[V];
      read(term.x, i, x);
      activate(term.activation, x, value, slope);
#pragma unroll
      for (int k = 0; k < V; ++k) y[k] *= slope[k];
    }
#pragma unroll
    for (int k = 0; k < V; ++k) total[k] = fmaf(term.a, y[k], total[k]);
  }
  write(sum.out, i, total);
}

template <int V>
__global__ void __launch_bounds__(kThreads) combine_kernel(const Sum sum) {
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t threads = int64_t(gridDim.x) * kThreads;
  const int64_t vectors = sum.elements / V;
  for (int64_t i = thread; i < vectors; i += threads) add_up<V>(sum, i * V);
  // Fewer than V are left.
  if (vectors * V + thread < sum.elements) add_up<1>(sum, vectors * V + thread);
}

}  // namespace

void combine(const Gpu& gpu, Array out, int64_t elements, std::span<const Term> terms) {
  Sum sum{out, elements, int(terms.size()), {}};
  std::copy(terms.begin(), terms.end(), sum.terms);
  bool aligned = true;
  for (const Term& term : terms) aligned &= lanes_of(4, {out, term.y, term.x}) == 4;
  const int64_t per_cta = kThreads * (aligned ? 4 : 1);
  const int64_t ctas = (elements + per_cta - 1) / per_cta;
  const dim3 grid(unsigned(std::clamp<int64_t>(ctas, 1, kCtasPerProcessor * gpu.processors)));
  launch(gpu, aligned ? combine_kernel<4> : combine_kernel<1>, grid, kThreads, 0, sum);
}

// ------------------------------------------------------------------------------------ activation

namespace {

// out = σ(z + b), or d · σ'(z + b) if there is a d
template <int V>
__global__ void __launch_bounds__(kThreads)
    activation_kernel(Array out, Array z, Array bias, Array d, Activation activation,
                      const Tiles tiles) {
  const Part<V> part(tiles);
  if (!part.inside()) return;
  float b[V];
  gather(bias, part.channel, part.channel_stride, 0, b);
  part.for_each([&](int64_t i) {
    float u[V], value[V], slope[V];
    read(z, i, u);
#pragma unroll
    for (int k = 0; k < V; ++k) u[k] += b[k];
    activate(activation, u, value, slope);
    if (d.at) {
      read(d, i, value);
#pragma unroll
      for (int k = 0; k < V; ++k) value[k] *= slope[k];
    }
    write(out, i, value);
  });
}

}  // namespace

void apply_activation(const Gpu& gpu, const Rows& rows, Array out, Array z, Array bias, Array d,
                      Activation activation) {
  const Tiles tiles(rows, lanes_of(rows.adjoining(), {out, z, d}));
  with_lanes(tiles.lanes, [&](auto lanes) {
    launch(gpu, activation_kernel<lanes.value>, tiles.grid(gpu), kThreads, 0, out, z, bias, d,
           activation, tiles);
  });
}

}  // namespace resode
