// The entrance of the compiled modules. Callers describe a stage in numbers and pass memory as an
// address with its bytes; here the memory is compared with what the numbers imply, before a pointer
// is taken. Kernels check nothing: they get the structs of stage.h from here.
//
// What does not fit throws std::invalid_argument, which Python sees as ValueError.

#pragma once

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "stage.h"

namespace resode {

// `bytes` bytes from the address `at` on, which the caller keeps alive; 0: absent.
struct Memory {
  uintptr_t at = 0;
  size_t bytes = 0;
};

struct ForwardMemory {
  Memory x, y, anchors, codes, scales, signs, statistics;
};

struct ReverseMemory {
  ReverseRule reverse_rule;
  int order;
  Memory start, anchors, codes, scales, signs, cotangent, grad_x;
  std::vector<Memory> gradients;  // in the order of Stage's parameters
  Memory nonfinite;
};

// No stage comes near these limits. Below them sizes that kernels compute fit into 64 bits.
constexpr int64_t kMaxSteps = std::numeric_limits<int32_t>::max(), kMaxWidth = 1 << 24;
constexpr int64_t kMaxThreads = 4096;
constexpr int64_t kMaxBytes = int64_t{1} << 40;     // of one state, of one block's parameter
constexpr int64_t kMaxTogether = int64_t{1} << 56;  // of the states of a reverse pass

[[noreturn]] inline void refuse(const std::string& message) {
  throw std::invalid_argument(message);
}

inline void check_between(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    refuse(std::string(name) + " must be from " + std::to_string(least) + " to " +
           std::to_string(most) + ", not " + std::to_string(value));
}

// The product of numbers that are not negative; more than any limit if it does not fit.
inline int64_t product(std::initializer_list<int64_t> factors) {
  int64_t result = 1;
  for (int64_t factor : factors)
    if (__builtin_mul_overflow(result, factor, &result)) return std::numeric_limits<int64_t>::max();
  return result;
}

inline int64_t bytes_of(DType type) {
  return type == DType::float64 ? 8 : type == DType::float32 ? 4 : 2;
}

// Memory for `needed` bytes of numbers that take `each`. `index`: of an entry of a table.
inline void check_memory(const char* name, Memory memory, int64_t needed, int64_t each,
                         int64_t index = -1) {
  if (needed == 0) return;
  const bool fits = memory.at && memory.bytes >= uint64_t(needed);
  if (fits && memory.at % uint64_t(each) == 0) return;
  const std::string entry = index < 0 ? "" : "[" + std::to_string(index) + "]";
  if (fits)
    refuse(name + entry + " must begin at a multiple of " + std::to_string(each) + " bytes");
  refuse(name + entry + " must have " + std::to_string(needed) + " bytes, not " +
         std::to_string(memory.at ? memory.bytes : 0));
}

inline void check_state(const char* name, const Stage& s, Memory memory, int64_t count = 1) {
  const int64_t each = bytes_of(s.stream);
  check_memory(name, memory, product({count, s.rows, s.dim, each}), each);
}

// For every block the addresses of its parameters, or of their gradients, in the order of `Stage`.
// Memory of blocks that work row by row is stacked: one after the other the tensors of all blocks.
// That of convolutional blocks is apart.
inline std::vector<void*> make_table(const char* name, const Stage& s,
                                     const std::vector<Memory>& given) {
  const int64_t blocks = s.blocks(), each = bytes_of(s.storage);
  const bool stacked = s.block != Block::conv;
  const int64_t entries = stacked ? s.count : product({blocks, s.count});
  if (int64_t(given.size()) != entries)
    refuse(std::string(name) + " must have " + std::to_string(entries) + " entries, not " +
           std::to_string(given.size()));
  int64_t bytes[kMaxParameters];  // of a block's tensor
  for (int k = 0; k < s.count; ++k) bytes[k] = s.elements(k) * each;
  for (int64_t i = 0; i < entries; ++i)
    if (given[i].at)
      check_memory(name, given[i], stacked ? product({blocks, bytes[i]}) : bytes[i % s.count], each,
                   i);
  std::vector<void*> table;
  table.reserve(blocks * s.count);
  for (int64_t n = 0; n < blocks; ++n)
    for (int k = 0; k < s.count; ++k) {
      const uintptr_t first = given[stacked ? k : n * s.count + k].at;
      table.push_back(reinterpret_cast<void*>(first && stacked ? first + n * bytes[k] : first));
    }
  return table;
}

inline void check_convolutions(const Stage& s) {
  check_between("the number of convolutions", s.layers, 2, kMaxLayers);
  int64_t channels = s.dim;
  for (int l = 0; l < s.layers; ++l) {
    const Convolution& c = s.convolutions[l];
    check_between("the channels of a convolution", c.out, 1, kMaxWidth);
    if (c.in != channels) refuse("a convolution must take the channels of the one before");
    if (c.size != 1 && c.size != 3) refuse("a convolution must be of size 1 or 3");
    channels = c.out;
  }
  if (channels != s.dim) refuse("the last convolution must return as many channels as a state has");
  check_between("height", s.height, 1, s.rows);
  check_between("width", s.width, 1, s.rows);
  if (s.rows % product({s.height, s.width}) != 0) refuse("rows must be those of whole images");
}

inline void check_bits(int bits, bool may_be_kept) {
  const bool known = (bits >= 2 && bits <= 6) || bits == 8 || bits == 12 || bits == 16 ||
                     (bits == 0 && may_be_kept);
  if (!known) refuse("bits must be 2, 3, 4, 5, 6, 8, 12 or 16, not " + std::to_string(bits));
}

inline void check_bits(const Stage& s) {
  if (!s.records()) return;
  if (s.bits_count != 1 && s.bits_count != s.steps)
    refuse("bits must have 1 entry or one for each step, not " + std::to_string(s.bits_count));
  for (int64_t i = 0; i < s.bits_count; ++i) check_bits(s.bits[i], true);
}

// Completes a stage of which all but its parameters is given, and returns their table, to which the
// stage refers.
inline std::vector<void*> complete(Stage& s, const std::vector<Memory>& parameters) {
  check_between("steps", s.steps, 1, kMaxSteps);
  check_between("rows", s.rows, 1, kMaxBytes);
  check_between("dim", s.dim, 1, kMaxWidth);
  check_between("hidden", s.hidden, 1, kMaxWidth);
  check_between("anchor_every", s.anchor_every, 0, kMaxSteps);
  check_between("threads", s.threads, 1, kMaxThreads);
  check_bits(s);
  if (s.block != Block::linear && s.activation == Activation::identity)
    refuse("activation must not be 'identity', except of linear blocks");
  if (!std::isfinite(s.step)) refuse("step must be finite");
  if (!(s.epsilon >= 0 && std::isfinite(s.epsilon)))
    refuse("epsilon must be 0 or more, and finite");
  if ((s.stream == DType::float64) != (s.storage == DType::float64))
    refuse("stream and storage must both be float64, or neither");
  if (product({s.rows, s.dim, bytes_of(s.stream)}) > kMaxBytes)
    refuse("rows and dim: a state must not be larger than 1 TiB");
  if (s.block == Block::conv) check_convolutions(s);
  s.count = s.block == Block::mlp ? 4 : s.block == Block::linear ? 1 : 5 * s.layers;
  for (int k = 0; k < s.count; ++k)
    if (s.elements(k) > kMaxBytes / 8) refuse("a block's parameter must not be larger than 1 TiB");

  std::vector<void*> table = make_table("parameters", s, parameters);
  const auto absent = [&](size_t i) { return parameters[i].at == 0; };
  for (size_t i = 0; i < parameters.size(); ++i) {
    const bool weight = s.block == Block::conv ? i % 5 == 0 : i % 2 == 0;
    if (weight && absent(i)) refuse("parameters[" + std::to_string(i) + "] is a weight: give it");
    if (s.block == Block::conv && i % 5 == 3 && absent(i) != absent(i + 1))
      refuse("parameters[" + std::to_string(i) +
             "] and the next, mean and variance: give both or none");
  }
  s.parameters = table.data();
  s.anchor_every = std::min(s.anchor_every, s.steps);  // beyond there are none either
  return table;
}

// What a pass keeps of its states.
struct KeptCounts {
  int64_t anchors = 0, increments = 0,
          code_bytes = 0;  // code_bytes: of all increments of 8 columns
};
inline KeptCounts kept_counts(const Stage& s) {
  const int64_t every = s.anchor_every ? s.anchor_every : s.steps;
  if (!s.records()) return {(s.steps - 1) / every, 0, 0};
  KeptCounts counts;
  if (s.bits_count == 1) {
    counts.anchors = s.bits[0] ? (s.steps + every - 1) / every : s.steps;
    counts.increments = s.steps - counts.anchors;
    counts.code_bytes = counts.increments * s.bits[0];
    return counts;
  }
  for (int64_t n = 0; n < s.steps; ++n) {
    const int bits = s.bits_of(n);
    (bits ? counts.increments : counts.anchors) += 1;
    counts.code_bytes += bits;
  }
  return counts;
}

// Checks the memory that the forward pass leaves to the reverse pass.
template <class Io>
void check_kept(const Stage& s, const Io& io) {
  const KeptCounts counts = kept_counts(s);
  check_state("anchors", s, io.anchors, counts.anchors);
  const int64_t octets = (s.dim + 7) / 8, groups = (s.dim + 31) / 32;
  check_memory("codes", io.codes, product({counts.code_bytes, s.rows, octets}), 1);
  check_memory("scales", io.scales, product({counts.increments, s.rows, groups, 2}), 2);
  if (!io.signs.at) return;
  if (s.block == Block::linear || s.activation != Activation::relu)
    refuse("signs are kept of blocks with the activation 'relu' only");
  check_memory("signs", io.signs, product({s.evaluations(), s.rows, s.sign_bytes()}), 1);
}

template <class T>
T* pointer(Memory memory) {
  return reinterpret_cast<T*>(memory.at);
}

struct IncrementMemory {
  DType stream;
  int64_t rows, row;
  int bits;
  Memory x, estimate, moved, codes, scales;
  int threads;
};

inline Increment checked(const IncrementMemory& io) {
  check_between("rows", io.rows, 1, kMaxBytes);
  check_between("row", io.row, 1, kMaxBytes);
  check_between("threads", io.threads, 1, kMaxThreads);
  check_bits(io.bits, false);
  const int64_t each = bytes_of(io.stream), state = product({io.rows, io.row, each});
  if (state > kMaxBytes) refuse("rows and row: a state must not be larger than 1 TiB");
  if (io.x.at) check_memory("x", io.x, state, each);
  check_memory("estimate", io.estimate, state, each);
  check_memory("moved", io.moved, state, each);
  check_memory("codes", io.codes, product({io.rows, (io.row + 7) / 8, io.bits}), 1);
  check_memory("scales", io.scales, product({io.rows, (io.row + 31) / 32, 2}), 2);
  return {io.stream,
          io.rows,
          io.row,
          io.bits,
          pointer<const void>(io.x),
          pointer<const void>(io.estimate),
          pointer<void>(io.moved),
          pointer<void>(io.codes),
          pointer<void>(io.scales),
          io.threads};
}

inline Forward checked(const Stage& s, const ForwardMemory& io) {
  check_state("x", s, io.x);
  check_state("y", s, io.y);
  check_kept(s, io);
  int64_t channels = 0;
  for (int l = 0; l < s.layers; ++l) channels += s.convolutions[l].out;
  const int64_t each = bytes_of(s.stream);
  if (io.statistics.at)
    check_memory("statistics", io.statistics, product({s.evaluations(), 2, channels, each}), each);
  return {pointer<const void>(io.x),   pointer<void>(io.y),      pointer<void>(io.anchors),
          pointer<void>(io.codes),     pointer<void>(io.scales), pointer<void>(io.signs),
          pointer<void>(io.statistics)};
}

// `table` becomes that of the gradients, to which the result refers.
inline Reverse checked(const Stage& s, const ReverseMemory& io, std::vector<void*>& table) {
  const bool exact = io.reverse_rule == ReverseRule::exact,
             predicted = io.reverse_rule == ReverseRule::predicted;
  check_between("order", io.order, 1, predicted ? kMaxOrder : kMaxSteps);
  if (exact)
    check_between("anchor_every of the reverse rule 'exact'", s.anchor_every, 1, kMaxSteps);
  const int64_t states = (exact ? s.anchor_every : 1) + kMaxOrder + 2;
  if (product({states, s.rows, s.dim + 64, 8}) > kMaxTogether)
    refuse("anchor_every: so many states of this size cannot be held");
  if ((io.reverse_rule == ReverseRule::recorded) != s.records())
    refuse("bits of the stage must be given for the reverse rule 'recorded', and only for it");
  if (io.signs.at && exact) refuse("signs are of no use to the reverse rule 'exact'");
  check_state("start", s, io.start);
  check_kept(s, io);
  check_state("cotangent", s, io.cotangent);
  if (io.grad_x.at) check_state("grad_x", s, io.grad_x);
  if (io.nonfinite.at) check_memory("nonfinite", io.nonfinite, sizeof(int32_t), sizeof(int32_t));
  table = make_table("gradients", s, io.gradients);
  for (size_t i = 0; i < table.size(); ++i) {
    if (!table[i]) continue;
    if (!s.parameters[i])
      refuse("gradients[" + std::to_string(i) + "] is of a parameter that is absent");
    if (s.block == Block::conv && i % 5 >= 3)
      refuse("gradients[" + std::to_string(i) + "]: mean and variance have no gradient");
  }
  return {io.reverse_rule,
          io.order,
          pointer<const void>(io.start),
          pointer<const void>(io.anchors),
          pointer<const void>(io.codes),
          pointer<const void>(io.scales),
          pointer<const void>(io.signs),
          pointer<const void>(io.cotangent),
          pointer<void>(io.grad_x),
          table.data(),
          pointer<int32_t>(io.nonfinite)};
}

// Memory in which a pass is run; it begins at a multiple of `alignment`.
inline void* checked_workspace(Memory memory, size_t bytes, int64_t alignment) {
  check_memory("workspace", memory, int64_t(std::max<size_t>(bytes, 1)), alignment);
  return pointer<void>(memory);
}

}  // namespace resode
