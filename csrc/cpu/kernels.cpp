// The CPU kernels of one instruction set: compiled once for each, with RESODE_ISA naming it.

#include "blocks/conv.h"
#include "blocks/linear.h"
#include "blocks/mlp.h"
#include "core/peak.h"
#include "passes/forward.h"
#include "passes/reverse.h"

namespace {

// Calls f<T, Scheme, Block>() for what the stage asks for.
template <class T, class Block, class F>
size_t with_scheme(const Stage& s, F f) {
  if (s.scheme == resode::Scheme::heun) return f.template operator()<T, Heun<T, Block>, Block>();
  return f.template operator()<T, Euler<T, Block>, Block>();
}
template <class T, class F>
size_t with_block(const Stage& s, F f) {
  if (s.block == resode::Block::conv) return with_scheme<T, Conv<T>>(s, f);
  if (s.block == resode::Block::linear) return with_scheme<T, Linear<T>>(s, f);
  return with_scheme<T, Mlp<T>>(s, f);
}
template <class F>
size_t with_types(const Stage& s, F f) {
  if (s.stream == resode::DType::float64) return with_block<double>(s, f);
  return with_block<float>(s, f);
}

size_t run_forward(const Stage& s, const resode::Forward& io, void* workspace, resode::Stop stop) {
  return with_types(s, [&]<class T, class Scheme, class Block>() {
    return forward<T, Scheme, Block>(s, io, workspace, stop);
  });
}

size_t run_reverse(const Stage& s, const resode::Reverse& io, void* workspace, resode::Stop stop) {
  return with_types(s, [&]<class T, class Scheme, class Block>() {
    return reverse<T, Scheme, Block>(s, io, workspace, stop);
  });
}

void run_increment(const resode::Increment& io) {
  const auto run = [&]<class T>(T) {
    Halt never;
    Team::run(io.threads, never, [&](Team team) {
      const Share rows(io.rows, team.rank, team.size);
      const auto place = [&](const void* state) {
        T* const first = static_cast<T*>(const_cast<void*>(state)) + rows.begin * io.row;
        return InRows<T>{first, rows.end - rows.begin, io.row};
      };
      const Recorded at{static_cast<uint8_t*>(io.codes) + rows.begin * code_bytes(io.row, io.bits),
                        static_cast<uint16_t*>(io.scales) + rows.begin * groups_of(io.row)};
      const Share groups = Share::all(groups_of(io.row));
      if (io.x)
        record(place(io.x), place(io.estimate), place(io.moved), at, io.bits, groups);
      else
        undo(place(io.estimate), place(io.moved), at, io.bits, groups);
    });
  };
  io.stream == resode::DType::float64 ? run(double{}) : run(float{});
}

resode::Crews crews(const Stage& s) {
  resode::Crews found{};
  with_types(s, [&]<class T, class Scheme, class Block>() {
    const Tiling tiling = Block::tiling(s);
    found = {tiling.threads / tiling.crew, tiling.crew};
    return size_t(0);
  });
  return found;
}

// Stages are padded to whole panels: wide vectors are wasted on narrow ones. In panels of one
// vector products take 1.1 times as long, as measured: they read the left operand twice as often.
double cost(const Stage& s) {
  const auto products = [&]<class T>(T) {
    if (s.block != resode::Block::conv) return padded<T>(s.dim) * padded<T>(s.hidden);
    int64_t sum = 0;
    for (int l = 0; l < s.layers; ++l) {
      const resode::Convolution& c = s.convolutions[l];
      sum += c.size * c.size * padded<T>(c.in) * padded<T>(c.out);
    }
    return sum;
  };
#if defined(__FMA__) || !defined(__x86_64__)
  constexpr int kInstructions = 1;
#else
  constexpr int kInstructions = 2;
#endif
  const bool wide = s.stream == resode::DType::float64;
  return (kPanelVectors == 1 ? 1.1 : 1.0) * kInstructions *
         double(wide ? products(double{}) : products(float{})) / kVectorBytes;
}

}  // namespace

#define RESODE_NAME_(isa) kernels_##isa
#define RESODE_NAME(isa) RESODE_NAME_(isa)
#define RESODE_NAME_TEXT(isa) RESODE_TEXT(isa)

namespace resode {

extern const Kernels RESODE_NAME(RESODE_ISA);
const Kernels RESODE_NAME(RESODE_ISA) = {
    RESODE_NAME_TEXT(RESODE_ISA), cost, crews, run_forward, run_reverse, run_increment, fma_peak};

}  // namespace resode
