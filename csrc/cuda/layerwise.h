// What the layer-wise path launches between matrix products and convolutions. Each function is
// defined right below its kernel. A function with a workspace returns the bytes it needs, and runs
// nothing, if the workspace is null.

#pragma once

#include <span>

#include "../stage.h"
#include "launch.h"

namespace resode {

// float32, float16 or bfloat16; arithmetic is in float32
struct Array {
  void* at;  // null: absent
  DType type;
};

// How a dense tensor is seen:
//
//   [rows, channels]              1 group, a row per position    neighbouring channels adjoin
//   channels-last [n, c, h, w]    1 group, n·h·w positions       neighbouring channels adjoin
//   contiguous [n, c, h, w]       n groups, h·w positions        neighbouring positions adjoin
struct Rows {
  int64_t groups, positions, channels;
  bool channels_adjoin;

  int64_t adjoining() const { return channels_adjoin ? channels : positions; }
};

// elementwise.cu

// a y, or a y σ'(x) if there is an x
struct Term {
  float a;
  Array y, x;
  Activation activation;
};
constexpr int kMaxTerms = 5;

// The sum of the terms, which are laid out alike.
void combine(const Gpu& gpu, Array out, int64_t elements, std::span<const Term> terms);

// σ(z + bias), or d σ'(z + bias) if there is a d. The bias has a number per channel.
void apply_activation(const Gpu& gpu, const Rows& rows, Array out, Array z, Array bias, Array d,
                      Activation activation);

// normalization.cu

// A number per channel each; without γ and β they are 1 and 0.
struct Normalization {
  Array mean, variance, gamma, beta;
  float epsilon;
};

// Mean and biased variance of every channel. `programs`: about how many CTAs share the work; the
// order of summation depends on it.
size_t statistics(const Gpu& gpu, const Rows& rows, Array z, float* mean, float* variance,
                  int programs, void* workspace);

// σ(u), u = bn(z)
void normalize(const Gpu& gpu, const Rows& rows, Array out, Array z,
               const Normalization& normalization, Activation activation);

// The gradients of z, γ and β from d = ∂L/∂σ(u). of_batch: mean and variance are z's own.
size_t normalization_vjp(const Gpu& gpu, const Rows& rows, Array dz, float* d_gamma, float* d_beta,
                         Array d, Array z, const Normalization& normalization, bool of_batch,
                         Activation activation, int programs, void* workspace);

}  // namespace resode
