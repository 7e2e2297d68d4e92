// The blocks f of a depth-fused stage and their vector-Jacobian products, for a tile of rows.
//
//   mlp      f(x) = W2 σ(W1 x + b1) + b2          linear   f(x) = θ x
//
// A state is an operand of products while it lies in shared memory: x or p in `point`, the
// cotangent c in `cotangent`. Weights stream past it in chunks. An MLP's chunk is some of its
// hidden units, and the VJP at p with the cotangent s·c makes six products of it, five if the value
// is not wanted:
//
//   z = p W1ᵀ + b1,  u = σ(z),  dz = s (c W2) σ′(z)
//   f += u W2ᵀ,  ∂x += dz W1,  ∂W1 = dzᵀ p,  ∂W2 = s cᵀ u,      ∂b1 = Σ dz,  ∂b2 = s Σ c
//
// A linear block's chunk is some rows of its weight, which are some columns of f:
//
//   f = p θᵀ,  ∂x += s c θ,  ∂θ = s cᵀ p

#pragma once

#include "activate.h"
#include "gradients.h"
#include "products.h"
#include "state.h"
#include "storage.h"
#include "weights.h"

namespace resode {

// What both kinds of blocks share: the tiles in shared memory, and the chunks of weights, which
// have `units` units in all.
template <class P, Block kBlock>
class Shared {
 public:
  using Weight = typename P::Weight;

  __device__ Shared(const Network& net, int units, bool reverse)
      : net_(net),
        units_(units),
        layout_(kBlock, net.tiling, int(sizeof(Weight)), reverse),
        buffers_((units + net.tiling.chunk - 1) / net.tiling.chunk) {}

  // Where the state x̃ lies while the threads work at p.
  __device__ Tile<float> resting() const { return tile<float>(layout_.resting, net_.tiling.width); }

 protected:
  static __device__ __forceinline__ unsigned char* memory() {
    extern __shared__ __align__(16) unsigned char resode_shared[];
    return resode_shared;
  }
  template <class T>
  static __device__ __forceinline__ Tile<T> tile(int begin, int columns) {
    return {reinterpret_cast<T*>(memory() + begin), Layout::pitch(columns, int(sizeof(T)))};
  }
  __device__ Tile<float> point() const { return tile<float>(layout_.point, net_.tiling.width); }
  __device__ Tile<float> cotangent() const {
    return tile<float>(layout_.cotangent, net_.tiling.width);
  }
  // The tiles in a buffer of weights.
  __device__ Tile<Weight> w1(int buffer) const {
    return tile<Weight>(layout_.weights + buffer * layout_.buffer + layout_.w1, net_.tiling.width);
  }
  __device__ Tile<Weight> w2(int buffer) const {
    return tile<Weight>(layout_.weights + buffer * layout_.buffer + layout_.w2, net_.tiling.chunk);
  }
  __device__ Tile<Weight> b1(int buffer) const {
    return tile<Weight>(layout_.weights + buffer * layout_.buffer + layout_.b1, net_.tiling.chunk);
  }
  // Parameter k of block n.
  __device__ const Weight* parameter(int k, int n) const {
    return static_cast<const Weight*>(net_.parameters[k]) + n * net_.strides[k];
  }
  __device__ int depth() const { return round_up(net_.dim, 16); }  // of products over dim

  // Units first … first + count − 1; `padded`: so many rounded up to whole tiles.
  struct Chunk {
    int buffer, first, count, padded;
  };
  __device__ __forceinline__ Chunk chunk(int i) const {
    const int first = i * net_.tiling.chunk, count = min(net_.tiling.chunk, units_ - first);
    return {0, first, count, round_up(count, 16)};
  }
  // Waits for the i-th chunk of block n, which `source` loads.
  template <class Source>
  __device__ __forceinline__ Chunk acquire(int n, int i, int next, const Source& source) {
    Chunk c = chunk(i);
    c.buffer = buffers_.acquire(net_.block(n), i, next < 0 ? -1 : net_.block(next), source);
    return c;
  }

  const Network& net_;
  const int units_;
  const Layout layout_;
  DoubleBuffer buffers_;
};

// -------------------------------------------------------------------------------------------- mlp

template <class P>
class Mlp : public Shared<P, Block::mlp> {
  using Base = Shared<P, Block::mlp>;
  using Base::net_;
  using typename Base::Chunk;
  using typename Base::Weight;

 public:
  __device__ Mlp(const Network& net, bool reverse) : Base(net, net.hidden, reverse) {}

  // f_n(p), if `wanted`; if `back`, ∂_x f_n(p)ᵀ (s c), and ∂_θ f_n(p)ᵀ (s c) is added to the
  // gradients. `next`: the block that is evaluated after this one, or −1.
  __device__ __forceinline__ State evaluate(const Place& place, const State& p, int n, int next,
                                            bool wanted, State& value, bool back, const State& c,
                                            float s, const Gradients* gradients) {
    const int rows = net_.tiling.rows, dim = net_.dim;
    const Tile<float> point = Base::point(), cotangent = Base::cotangent();
    place.put(point, p);
    if (back) place.put(cotangent, c);
    value = bias(place, n);
    State gx{};
    for (int i = 0; i < Base::buffers_.chunks(); ++i) {
      const Chunk chunk = Base::acquire(n, i, next, *this);
      const Tile<Weight> w1 = Base::w1(chunk.buffer), w2 = Base::w2(chunk.buffer);
      each_tile(rows, chunk.padded, [&](int row, int unit) {
        Sum z[1] = {}, du[1] = {};
        float u[8], slope[8];
        add_product<P>(z, point, row, w1, unit, Base::depth());
        if (back) add_product_across<P>(du, cotangent, row, w2, unit, Base::depth());
        each_pair([&](int, int j, int i) {
          z[0].of[i] += bias1(chunk, unit + j), z[0].of[i + 1] += bias1(chunk, unit + j + 1);
        });
        activate(net_.activation, z[0].of, u, slope);
        each_pair([&](int r, int j, int i) {
          const bool inside = row + r < place.left;  // beyond, zeros keep the states finite
          const auto store = [&](Tile<float> tile, float x, float y) {
            store_pair(tile(row + r, unit + j), inside ? x : 0, inside ? y : 0, true, true);
          };
          store(hidden(), u[i], u[i + 1]);
          if (back)
            store(hidden_cotangent(), s * du[0].of[i] * slope[i],
                  s * du[0].of[i + 1] * slope[i + 1]);
        });
      });
      __syncthreads();
      if (place.active && wanted)
        add_product<P>(value.of, hidden(), place.row, w2, place.column, chunk.padded);
      if (!back) continue;
      if (place.active)
        add_product_across<P>(gx.of, hidden_cotangent(), place.row, w1, place.column, chunk.padded);
      if (gradients->wanted(0))
        each_tile(chunk.padded, Base::depth(), [&](int unit, int column) {
          gradients->add_outer<P>(0, 1, hidden_cotangent(), unit, point, column, rows,
                                  chunk.first + unit, column, net_.hidden, dim);
        });
      if (gradients->wanted(1))
        gradients->add_columns(1, 1, hidden_cotangent(), rows, chunk.first, chunk.count);
      if (gradients->wanted(2))
        each_tile(Base::depth(), chunk.padded, [&](int row, int unit) {
          gradients->add_outer<P>(2, s, cotangent, row, hidden(), unit, rows, row,
                                  chunk.first + unit, dim, net_.hidden);
        });
    }
    if (back) {
      if (gradients->wanted(3)) gradients->add_columns(3, s, cotangent, rows, 0, dim);
      __syncthreads();  // the operands may be overwritten now
    }
    return gx;
  }

 private:
  __device__ Tile<float> hidden() const {  // u
    return Base::template tile<float>(Base::layout_.value, net_.tiling.chunk);
  }
  __device__ Tile<float> hidden_cotangent() const {  // dz
    return Base::template tile<float>(Base::layout_.slope, net_.tiling.chunk);
  }
  __device__ float bias1(const Chunk& c, int unit) const {
    return net_.parameters[1] ? widen(*Base::b1(c.buffer)(0, unit)) : 0;
  }

  // b2, for every row
  __device__ __forceinline__ State bias(const Place& place, int n) const {
    State state{};
    if (net_.parameters[3]) {
      const Weight* const b2 = Base::parameter(3, net_.block(n));
      place.pairs(state, [&](int, int column, float& x, float& y) {
        if (column < net_.dim) x = widen(b2[column]);
        if (column + 1 < net_.dim) y = widen(b2[column + 1]);
      });
    }
    return state;
  }

  friend class DoubleBuffer;
  __device__ __forceinline__ void load(int n, int i, int buffer) const {
    const Chunk c = Base::chunk(i);
    const int dim = net_.dim, chunk = net_.tiling.chunk;
#pragma unroll 1  // the code of the copy is there once, not three times
    for (int k = 0; k < 3; ++k) {
      const Weight* const from = Base::parameter(k, n);
      if (k == 0)
        copy_async(Base::w1(buffer), chunk, net_.tiling.width, from + int64_t(c.first) * dim, dim,
                   c.count, dim);
      else if (k == 2)
        copy_async(Base::w2(buffer), net_.tiling.width, chunk, from + c.first, net_.hidden, dim,
                   c.count);
      else if (net_.parameters[1])
        copy_async(Base::b1(buffer), 1, chunk, from + c.first, 0, 1, c.count);
    }
  }
};

// ----------------------------------------------------------------------------------------- linear

template <class P>
class Linear : public Shared<P, Block::linear> {
  using Base = Shared<P, Block::linear>;
  using Base::net_;
  using typename Base::Chunk;
  using typename Base::Weight;

 public:
  __device__ Linear(const Network& net, bool reverse) : Base(net, net.dim, reverse) {}

  __device__ __forceinline__ State evaluate(const Place& place, const State& p, int n, int next,
                                            bool wanted, State& f, bool back, const State& c,
                                            float s, const Gradients* gradients) {
    const int rows = net_.tiling.rows, dim = net_.dim;
    const Tile<float> point = Base::point();
    place.put(point, p);
    if (back) place.put(Base::cotangent(), c);
    State gx{};
    for (int i = 0; i < Base::buffers_.chunks(); ++i) {
      const Chunk chunk = Base::acquire(n, i, next, *this);
      const Tile<Weight> weight = Base::w1(chunk.buffer);
      if (wanted)
        each_tile(rows, chunk.padded, [&](int row, int column) {
          Sum sum[1] = {};
          add_product<P>(sum, point, row, weight, column, Base::depth());
          each_pair([&](int r, int j, int i) {
            store_pair(value()(row + r, chunk.first + column + j), sum[0].of[i], sum[0].of[i + 1],
                       true, true);
          });
        });
      if (!back) continue;
      Tile<float> cotangent = Base::cotangent();
      cotangent.at += chunk.first;
      if (place.active)
        add_product_across<P>(gx.of, cotangent, place.row, weight, place.column, chunk.padded);
      if (gradients->wanted(0))
        each_tile(chunk.padded, Base::depth(), [&](int row, int column) {
          gradients->add_outer<P>(0, s, cotangent, row, point, column, rows, chunk.first + row,
                                  column, dim, dim);
        });
    }
    __syncthreads();  // the value is complete, and the operands may be overwritten
    if (wanted) f = place.take(value());
    return s * gx;
  }

 private:
  __device__ Tile<float> value() const {
    return Base::template tile<float>(Base::layout_.value, net_.tiling.width);
  }

  friend class DoubleBuffer;
  __device__ __forceinline__ void load(int n, int i, int buffer) const {
    const Chunk c = Base::chunk(i);
    copy_async(Base::w1(buffer), net_.tiling.chunk, net_.tiling.width,
               Base::parameter(0, n) + int64_t(c.first) * net_.dim, net_.dim, c.count, net_.dim);
  }
};

}  // namespace resode
