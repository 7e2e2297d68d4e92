// What a stage is and how it is run: plain numbers and addresses.
//
// Every backend's entry points take these structs, so nothing below this header knows torch.
// Names follow the paper: a stage makes N steps  x[n+1] = x[n] + h φ_n(x[n]).

#pragma once

#include <cstddef>
#include <cstdint>

#include "activations.h"

namespace resode {

// The version of the interface between Python and the compiled modules, to be raised together with
// INTERFACE of resode_kernels/backends/native.py when a signature, a struct or an enum changes.
constexpr int kInterface = 3;

// An enum, and as one text the names of its values in their order, which Python uses (bindings.h).
template <class Enum>
inline constexpr const char* kNames = nullptr;
#define RESODE_TEXT(...) #__VA_ARGS__
#define RESODE_ENUM(Enum, ...)     \
  enum class Enum { __VA_ARGS__ }; \
  template <>                      \
  inline constexpr const char* kNames<Enum> = RESODE_TEXT(__VA_ARGS__)

RESODE_ENUM(Block, mlp, linear, conv);
RESODE_ENUM(Scheme, euler, heun);
RESODE_ENUM(ReverseRule, exact, paper, refined, predicted, recorded);
RESODE_ENUM(DType, float32, float64, float16, bfloat16);
#define RESODE_NEXT(name, Struct) , name
RESODE_ENUM(Activation, identity RESODE_ACTIVATIONS(RESODE_NEXT));
#undef RESODE_NEXT

constexpr int kMaxLayers = 3;  // convolutions in a block
constexpr int kMaxParameters = 5 * kMaxLayers;
constexpr int kMaxOrder = 3;  // evaluations that `predicted` extrapolates from

// A convolution of size × size pixels, stride 1, zero padding.
struct Convolution {
  int64_t in, out;  // channels
  int64_t size;     // 1 or 3
};

struct Stage {
  Block block;
  Activation activation;
  Scheme scheme;
  int64_t steps;  // N
  double step;    // h
  bool tied;      // one block serves every step
  int64_t rows, dim, hidden;
  // conv: rows are the pixels of rows / (height · width) images, dim their channels
  int64_t height, width;
  int layers;
  Convolution convolutions[kMaxLayers];
  double epsilon;  // of batch normalization
  DType stream;    // of states and cotangents: float32 or float64
  DType storage;   // of the parameters and their gradients
  // A table: parameters[n · count + k] is the k-th parameter of block n, contiguous; null: absent.
  //   mlp     w1 [hidden, dim], b1 [hidden], w2 [dim, hidden], b2 [dim]
  //   linear  weight [dim, dim]
  //   conv    for each layer: weight [out, in, size, size], and of the batch normalization after it
  //           weight, bias, mean, variance [out]; mean and variance absent: those of the batch
  const void* const* parameters;
  int count;
  int64_t anchor_every;  // k: the states x[k], x[2k], … are kept as anchors; 0: none are
  // The bits in which increments are recorded: one number for all steps, or one for each. None:
  // nothing is recorded.
  const int* bits;
  int64_t bits_count;
  int threads;

  bool records() const { return bits_count > 0; }

  // The bits of the increment of step n; 0: the state x̂[n] is kept instead, and x̂[n+1] is x[n+1].
  int bits_of(int64_t n) const {
    const bool last = n + 1 == steps || (anchor_every && (n + 1) % anchor_every == 0);
    return last ? 0 : bits[bits_count == 1 ? 0 : n];
  }

  // Evaluations of f in the forward pass, and the bytes of a row's signs in one of them.
  int64_t evaluations() const { return steps * (scheme == Scheme::heun ? 2 : 1); }
  int64_t sign_bytes() const {
    if (block == Block::mlp) return (hidden + 7) / 8;
    int64_t sum = 0;
    for (int l = 0; l < layers; ++l) sum += (convolutions[l].in + 7) / 8;
    return sum;
  }

  int64_t blocks() const { return tied ? 1 : steps + (scheme == Scheme::heun); }

  // Of a block's k-th parameter.
  int64_t elements(int k) const {
    if (block == Block::linear) return dim * dim;
    if (block == Block::mlp) return k == 0 || k == 2 ? dim * hidden : k == 1 ? hidden : dim;
    const Convolution& c = convolutions[k / 5];
    return k % 5 == 0 ? c.out * c.in * c.size * c.size : c.out;
  }
};

// All states are [rows, dim], contiguous, in the stream's dtype; anchors are [count, rows, dim].
// If increments are recorded, all states that are kept are anchors, also the last, x̂[N−1].
struct Forward {
  const void* x;
  void* y;
  void* anchors;
  void* codes;   // of every recorded increment, one after the other (cpu/core/recording.h)
  void* scales;  // [recorded increments, rows, groups of a row], bfloat16
  // The signs of relu's arguments, one bit each (cpu/core/signs.h); null: they are not kept.
  //   mlp   [evaluations, rows, ⌈hidden/8⌉]
  //   conv  for every evaluation, one layer after the other, [rows, ⌈channels/8⌉] of its input
  void* signs;
  // conv: for every evaluation of f, in order, mean and unbiased variance of every layer that
  // normalizes by its batch: [evaluations, Σ 2 · out]; null: not wanted
  void* statistics;
};

struct Reverse {
  ReverseRule reverse_rule;
  int order;
  const void* start;    // where the pass starts: x[N], for `exact` x[0]; not for `recorded`
  const void* anchors;  // as Forward left them
  const void *codes, *scales, *signs;
  const void* cotangent;   // ∂L/∂x[N]
  void* grad_x;            // null: not needed
  void* const* gradients;  // a table like the parameters', in the storage dtype; null: not needed
  // Raised to the largest n whose point p, where the VJP of step n is taken, is not finite; null:
  // not wanted.
  int32_t* nonfinite;
};

// Recording outside of a pass, for stages whose blocks are not in kernels: the increment of one
// step, of states that are row-major matrices (cpu/core/recording.h).
//
//     record   moved ← x̂ + Q(x − x̂), to codes and scales
//     undo     moved ← x̂ − Q, from them; x is null
struct Increment {
  DType stream;
  int64_t rows, row;  // a row has so many elements
  int bits;
  const void *x, *estimate;
  void* moved;   // may be the estimate
  void* codes;   // [rows, octets of a row · bits]
  void* scales;  // [rows, groups of a row], bfloat16
  int threads;
};

// How a long pass is stopped: between its steps the calling thread asks, at most once in `seconds`,
// whether to. If so the pass returns early, and what it has written is of no use.
struct Stop {
  bool (*asked)(void* context);  // null: the pass runs to its end
  void* context;
  double seconds;
};

// How a stage's threads are divided: the threads of a crew work on the same rows.
struct Crews {
  int count, threads_each;
};

// The entry points of one build for one instruction set. Called with workspace = null, forward and
// reverse run nothing and return the bytes of workspace they need (64-byte aligned).
struct Kernels {
  const char* name;
  // Estimated cycles of one evaluation of f, to compare builds: its multiply-adds, padding
  // included, over those that the instruction set makes in a cycle.
  double (*cost)(const Stage&);
  Crews (*crews)(const Stage&);
  size_t (*forward)(const Stage&, const Forward&, void* workspace, Stop);
  size_t (*reverse)(const Stage&, const Reverse&, void* workspace, Stop);
  void (*increment)(const Increment&);
  double (*fma_peak)(int threads, double seconds);  // multiply-adds count as two, per second
};

}  // namespace resode
