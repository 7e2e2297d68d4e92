// Convolutions of stride 1 that keep the size of the image (zero padding), as matrix products. The
// pixels of a batch are the rows of a Matrix, image by image and line by line.
//
// A window of 1 × 1 is one product. A window of 3 × 3 is sixteen smaller ones, by Winograd's
// minimal filtering F(2×2, 3×3) (Lavin and Gray 2016): the image is cut into patches of 2 × 2
// results, and each patch, the 4 × 4 pixels d it depends on and the window g become 16 numbers,
// "points",
//
//     V = Bᵀ d B,   U = G g Gᵀ,   M = V ⊙ U,   z = Aᵀ M A
//
//          ⎡1  0 −1  0⎤        ⎡ 1   0   0⎤
//     Bᵀ = ⎢0  1  1  0⎥    G = ⎢1/2 1/2 1/2⎥    Aᵀ = ⎡1 1  1  0⎤
//          ⎢0 −1  1  0⎥        ⎢1/2−1/2 1/2⎥         ⎣0 1 −1 −1⎦
//          ⎣0  1  0 −1⎦        ⎣ 0   0   1⎦
//
// Summed over input channels, M is at each of the 16 points a product of matrices, patches × inputs
// by inputs × outputs: 4 multiplications per result, input and output instead of 9. The gradient of
// the weights is the transpose of that: with D = A dz Aᵀ it is Gᵀ (Σ Vᵀ D) G, the sum over patches.
// The gradient of the image is a convolution with the turned window.
//
// All coefficients are 0, ±1 and 1/2, and the sums over channels are nine times shorter than those
// of the plain formula: rounding errors stay at the level of a direct convolution's
// (tests/kernels/test_accuracy.py).

#pragma once

#include "../../core/epilogues.h"
#include "../../core/gemm.h"
#include "images.h"

namespace {

// One matrix per point, patches × channels.
template <class T>
struct Points {
  T* data;
  Band band;
  int64_t channels;

  Matrix<T> at(int64_t point) const { return {data + point * stride(), band.patches(), channels}; }
  // From one point's matrix to the next: a cache line more than its size, which tends to be a
  // multiple of 4 KiB. A patch's 16 points would share one set of the first-level cache.
  int64_t stride() const { return Matrix<T>{nullptr, band.patches(), channels}.size() + kLine; }
  int64_t size() const { return band.window.points() * stride(); }

 private:
  static constexpr int64_t kLine = 64 / sizeof(T);
};

// The matrices Bᵀ, Aᵀ and A applied to the elements of a vector.
template <class V>
RESODE_INLINE void times_b(const V (&d)[4], V (&v)[4]) {
  v[0] = d[0] - d[2];
  v[1] = d[1] + d[2];
  v[2] = d[2] - d[1];
  v[3] = d[1] - d[3];
}
template <class V>
RESODE_INLINE void times_a_t(const V (&m)[4], V& first, V& second) {
  first = m[0] + m[1] + m[2];
  second = m[1] - m[2] - m[3];
}
template <class V>
RESODE_INLINE void times_a(V first, V second, V (&d)[4]) {
  d[0] = first;
  d[1] = first + second;
  d[2] = first - second;
  d[3] = -second;
}

// f(panel and half of it, image, line of patches, index of its first patch). f is to be inlined:
// lines are short, and what f computes of sizes alone is then computed once.
template <class T, class F>
void for_each_line(Band b, int64_t panels, F f) {
  const int64_t lines = b.window.patches(b.lines), across = b.window.patches(b.window.width);
  for (int64_t j = 0; j < panels; ++j)
    for (int64_t image = 0; image < b.images; ++image)
      for (int64_t line = 0; line < lines; ++line)
        for (int c = 0; c < kPanel<T>; c += kLanes<T>)
          f(j, c, image, line, (image * lines + line) * across);
}

// v ← Bᵀ d B for every patch; for a window of 1 × 1 a copy.
template <class T>
void analyse(Canvas<T> d, Points<T> v) {
  const int64_t across = d.band.window.patches(d.band.window.width);
  const int64_t stride = v.stride(), pitch = d.pitch() * kPanel<T>;
  const auto transform = [=](int64_t j, int c, int64_t image, int64_t line,
                             int64_t patch) RESODE_ALWAYS {
    const T* from = d.corner(j, image, line) + c;
    T* to = v.at(0).at(j, patch) + c;
    if (d.band.window.size == 1) {
      for (int64_t x = 0; x < across; ++x) store(to + x * kPanel<T>, load(from + x * kPanel<T>));
      return;
    }
    // Two of a patch's four columns are the next patch's first two.
    Vec<T> columns[4][4];
    const auto column = [&](int64_t x, Vec<T>(&out)[4]) RESODE_ALWAYS {
      Vec<T> pixels[4];
#pragma GCC unroll 4
      for (int y = 0; y < 4; ++y) pixels[y] = load(from + y * pitch + x * kPanel<T>);
      times_b(pixels, out);
    };
    column(0, columns[0]);
    column(1, columns[1]);
    for (int64_t x = 0; x < across; ++x, to += kPanel<T>) {
      column(2 * x + 2, columns[2]);
      column(2 * x + 3, columns[3]);
#pragma GCC unroll 4
      for (int y = 0; y < 4; ++y) {
        const Vec<T> row[4] = {columns[0][y], columns[1][y], columns[2][y], columns[3][y]};
        Vec<T> out[4];
        times_b(row, out);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) store(to + (4 * y + k) * stride, out[k]);
        columns[0][y] = row[2];
        columns[1][y] = row[3];
      }
    }
  };
  for_each_line<T>(d.band, d.panels(), transform);
}

// d ← A dz Aᵀ for every patch; for a window of 1 × 1 a copy.
template <class T>
void spread(Canvas<T> dz, Points<T> d) {
  if (dz.band.window.size == 1) return analyse(dz, d);
  const int64_t across = dz.band.window.patches(dz.band.window.width);
  const int64_t stride = d.stride(), pitch = dz.pitch() * kPanel<T>;
  const auto transform = [=](int64_t j, int c, int64_t image, int64_t line,
                             int64_t patch) RESODE_ALWAYS {
    const T* from = dz.corner(j, image, line) + pitch + kPanel<T> + c;  // inside the rim
    T* to = d.at(0).at(j, patch) + c;
    for (int64_t x = 0; x < across; ++x, from += 2 * kPanel<T>, to += kPanel<T>) {
      Vec<T> left[4], right[4];
      times_a(load(from), load(from + pitch), left);
      times_a(load(from + kPanel<T>), load(from + pitch + kPanel<T>), right);
#pragma GCC unroll 4
      for (int y = 0; y < 4; ++y) {
        Vec<T> out[4];
        times_a(left[y], right[y], out);
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) store(to + (4 * y + k) * stride, out[k]);
      }
    }
  };
  for_each_line<T>(dz.band, dz.panels(), transform);
}

// z ← Aᵀ m A for panel j of every patch: the band's pixels, one after the other.
template <class T>
void synthesise(Points<T> m, int64_t j, T* z) {
  const Band b = m.band;
  const int64_t width = b.window.width, stride = m.stride();
  if (b.window.size == 1) {
    memcpy(z, m.at(0).at(j, 0), b.pixels() * kPanel<T> * sizeof(T));
    return;
  }
  const auto transform = [=](int64_t, int c, int64_t image, int64_t line,
                             int64_t patch) RESODE_ALWAYS {
    const T* from = m.at(0).at(j, patch) + c;
    T* const to = z + (image * b.lines + 2 * line) * width * kPanel<T> + c;
    const bool second = 2 * line + 1 < b.lines;
    for (int64_t x = 0; x < width; x += 2, from += kPanel<T>) {
      Vec<T> upper[4], lower[4];
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        const Vec<T> column[4] = {load(from + k * stride), load(from + (4 + k) * stride),
                                  load(from + (8 + k) * stride), load(from + (12 + k) * stride)};
        times_a_t(column, upper[k], lower[k]);
      }
      Vec<T> out[4];
      times_a_t(upper, out[0], out[1]);
      times_a_t(lower, out[2], out[3]);
      T* const at = to + x * kPanel<T>;
      store(at, out[0]);
      if (second) store(at + width * kPanel<T>, out[2]);
      if (x + 1 == width) continue;
      store(at + kPanel<T>, out[1]);
      if (second) store(at + (width + 1) * kPanel<T>, out[3]);
    }
  };
  for_each_line<T>(b, 1, transform);
}

// A layer's weights at all points: inputs × outputs each, `rows` being the padded inputs.
template <class T>
Matrix<T> weights_at(Matrix<T> w, int64_t points, int64_t point) {
  Matrix<T> m{w.data, w.rows / points, w.columns};
  m.data += point * m.size();
  return m;
}

// m ← v u at every point
template <class T>
void multiply_points(Points<T> v, Matrix<T> u, Points<T> m) {
  const int64_t points = v.band.window.points();
  for (int64_t k = 0; k < points; ++k)
    multiply(v.at(k), weights_at(u, points, k), nullptr, Accumulate<T>{m.at(k).data, true},
             Share::all(u.panels()));
}

// sum ← vᵀ d at a point, added to what is there unless fresh
template <class T>
void multiply_point_transposed(Points<T> v, Points<T> d, int64_t point, Matrix<T> sum, bool fresh) {
  const Matrix<T> at = weights_at(sum, v.band.window.points(), point);
  multiply_transposed(v.at(point), d.at(point), Accumulate<T>{at.data, fresh},
                      Share::all(at.panels()));
}

constexpr int kMaxTaps = 9;  // of a window

// The window of one input and some outputs (lanes) at all points: u = G g Gᵀ
template <class V>
void lift_window(const V (&g)[kMaxTaps], V (&u)[kPoints]) {
  V rows[4][3];
  for (int x = 0; x < 3; ++x) {
    const V outer = (g[x] + g[6 + x]) * 0.5f, inner = g[3 + x] * 0.5f;
    rows[0][x] = g[x];
    rows[1][x] = outer + inner;
    rows[2][x] = outer - inner;
    rows[3][x] = g[6 + x];
  }
  for (int y = 0; y < 4; ++y) {
    const V outer = (rows[y][0] + rows[y][2]) * 0.5f, inner = rows[y][1] * 0.5f;
    u[4 * y] = rows[y][0];
    u[4 * y + 1] = outer + inner;
    u[4 * y + 2] = outer - inner;
    u[4 * y + 3] = rows[y][2];
  }
}

// Where the point of a window is that of the turned window: turning swaps G's first row and its
// last.
constexpr int64_t turn_point(int64_t point) {
  const auto turn = [](int64_t k) { return k % 3 == 0 ? 3 - k : k; };
  return 4 * turn(point / 4) + turn(point % 4);
}

// Its transpose: g = Gᵀ u G
template <class V>
void lower_window(const V (&u)[kPoints], V (&g)[kMaxTaps]) {
  V rows[3][4];
  for (int x = 0; x < 4; ++x) {
    const V sum = (u[4 + x] + u[8 + x]) * 0.5f, difference = (u[4 + x] - u[8 + x]) * 0.5f;
    rows[0][x] = u[x] + sum;
    rows[1][x] = difference;
    rows[2][x] = sum + u[12 + x];
  }
  for (int y = 0; y < 3; ++y) {
    const V sum = (rows[y][1] + rows[y][2]) * 0.5f, difference = (rows[y][1] - rows[y][2]) * 0.5f;
    g[3 * y] = rows[y][0] + sum;
    g[3 * y + 1] = difference;
    g[3 * y + 2] = sum + rows[y][3];
  }
}

}  // namespace
