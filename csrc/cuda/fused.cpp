// The depth-fused stage: the launches that make up a pass.
//
// A launch of the reverse pass makes so many steps that their partial sums of gradients fit into
// half of the GPU's last-level cache, since a CTA comes back to them with every tile of rows. The
// sums of the blocks that are complete are then added up. Under Heun two steps share a block, whose
// sums stay in their slot from one launch to the next.

#include "fused.h"

#include <algorithm>

namespace resode {

extern const FusedKernels fused_float32, fused_tf32, fused_float16, fused_bfloat16;

namespace {

const FusedKernels& kernels_for(const Stage& stage, const Gpu& gpu) {
  switch (stage.storage) {
    case DType::float16:
      return fused_float16;
    case DType::bfloat16:
      return fused_bfloat16;
    default:
      return gpu.tf32 ? fused_tf32 : fused_float32;
  }
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Elements from parameter k of a block to that of the next, in a table as stage.h has them.
int64_t stride(const Stage& stage, const void* const* table, int k, int bytes) {
  if (stage.blocks() == 1) return 0;
  return (static_cast<const char*>(table[stage.count + k]) - static_cast<const char*>(table[k])) /
         bytes;
}

// The tallest tile in which every warp has a part, or a lower one if the rows would not give every
// multiprocessor a tile; with the widest chunk of weights that fits beside it.
std::optional<Launches> launches(const Stage& stage, const Gpu& gpu, bool reverse) {
  const bool depth_fused = stage.block == Block::mlp || stage.block == Block::linear;
  if (!depth_fused || stage.stream != DType::float32 || stage.records()) return {};
  const FusedKernels& kernels = kernels_for(stage, gpu);
  const int width = round_up(stage.dim, kStateColumns);
  const int units = round_up(stage.block == Block::mlp ? stage.hidden : stage.dim, 16);
  const int64_t most = kWarps * kStateColumns / width, needed = ceil_div(stage.rows, 16);
  for (int64_t parts = std::min(most, ceil_div(needed, gpu.processors)); parts > 0; parts /= 2)
    for (int chunk : {64, 32, 16}) {
      const Tiling tiling{int(parts) * 16, width, std::min(chunk, units)};
      const Layout layout(stage.block, tiling, kernels.weight_bytes, reverse);
      if (size_t(layout.bytes) > gpu.shared_memory) continue;
      const int64_t tiles = ceil_div(stage.rows, tiling.rows);
      const int programs = int(reverse ? std::min<int64_t>(tiles, gpu.processors) : tiles);
      return Launches{&kernels, tiling, size_t(layout.bytes), programs, int(stage.steps)};
    }
  return {};
}

Network network(const Stage& stage, const Launches& launches) {
  Network net{};
  net.activation = stage.activation;
  net.scheme = stage.scheme;
  net.tied = stage.tied;
  net.steps = int(stage.steps);
  net.h = float(stage.step);
  net.rows = stage.rows;
  net.dim = int(stage.dim);
  net.hidden = int(stage.hidden);
  net.tiling = launches.tiling;
  for (int k = 0; k < stage.count; ++k) {
    net.parameters[k] = stage.parameters[k];
    if (net.parameters[k])
      net.strides[k] = stride(stage, stage.parameters, k, launches.kernels->weight_bytes);
  }
  return net;
}

// Hands out pieces of the workspace.
class Arena {
 public:
  explicit Arena(void* begin) : begin_(static_cast<char*>(begin)) {}

  float* floats(int64_t count) {
    float* const piece = reinterpret_cast<float*>(begin_ + used_);
    used_ += size_t(ceil_div(count * 4, 256) * 256);
    return piece;
  }
  size_t used() const { return used_; }

 private:
  char* begin_;
  size_t used_ = 0;
};

// Partial sums, one after the other, of the parameters whose gradients are wanted.
Sums layout_sums(const Stage& stage, const Reverse& io) {
  Sums sums{};
  for (int k = 0; k < kBlockParameters; ++k) {
    sums.offsets[k] = -1;
    if (k >= stage.count || !io.gradients[k]) continue;
    sums.offsets[k] = sums.size;
    sums.size += ceil_div(stage.elements(k), 4) * 4;
  }
  return sums;
}

// The reverse pass, launch by launch.
class Reverser {
 public:
  Reverser(const Plan<Reverse>& plan, void* workspace)
      : stage_(plan.stage),
        io_(plan.io),
        gpu_(plan.gpu),
        launches_(plan.launches),
        arena_(workspace) {
    const Stage& stage = stage_;
    const Reverse& io = io_;
    const int64_t state = stage.rows * stage.dim;
    const bool predicted = io.reverse_rule == ReverseRule::predicted;
    walk_.reverse_rule = io.reverse_rule;
    walk_.order = io.order;
    walk_.anchors = static_cast<const float*>(io.anchors);
    walk_.cotangent = static_cast<const float*>(io.cotangent);
    walk_.anchor_every = int(stage.anchor_every);
    walk_.nonfinite = io.nonfinite;
    walk_.end_cotangent = io.grad_x ? static_cast<float*>(io.grad_x) : arena_.floats(state);
    walk_.history = arena_.floats(predicted ? io.order * state : 0);
    state_ = arena_.floats(
        io.reverse_rule == ReverseRule::exact || launches_.steps >= stage.steps ? 0 : state);
    between_ =
        arena_.floats(io.reverse_rule == ReverseRule::exact ? (stage.anchor_every - 1) * state : 0);
    walk_.sums = layout_sums(stage, io);
    walk_.sums.slots = stage.tied ? 1 : launches_.steps + (stage.scheme == Scheme::heun);
    walk_.sums.at = arena_.floats(walk_.sums.slots * launches_.programs * walk_.sums.size);
  }

  size_t workspace_bytes() const { return arena_.used(); }

  void run() {
    net_ = network(stage_, launches_);
    if (io_.reverse_rule == ReverseRule::exact)
      recompute();
    else
      make(0, net_.steps, static_cast<const float*>(io_.start));
  }

 private:
  // The steps of the rule `exact`: the states between two anchors are computed again from
  // the first of the two.
  void recompute() {
    const int k = int(stage_.anchor_every);
    const auto* const start = static_cast<const float*>(io_.start);
    const int64_t state = stage_.rows * stage_.dim;
    if (k == 1) {
      walk_.states = walk_.anchors;
      return make(0, net_.steps, start);
    }
    const Launches forward = *launches(stage_, gpu_, false);
    const Network net = network(stage_, forward);
    for (int end = net_.steps; end > 0;) {
      const int begin = (end - 1) / k * k;
      const float* const from = begin ? walk_.anchors + (begin / k - 1) * state : start;
      if (const int more = end - begin - 1; more > 0) {
        forward.kernels->walk(gpu_, stage_.block, forward.programs, forward.shared, net,
                              {from, between_ + (more - 1) * state, between_, begin, end - 1, 1});
      }
      walk_.states = between_;
      walk_.states_begin = begin;
      make(begin, end, from);
      end = begin;
    }
  }

  // The steps end − 1 … begin.
  void make(int begin, int end, const float* start) {
    for (walk_.start = start; end > begin; end = walk_.begin) {
      walk_.begin = std::max(begin, end - launches_.steps);
      walk_.end = end;
      walk_.end_state =
          walk_.reverse_rule == ReverseRule::exact || walk_.begin == 0 ? nullptr : state_;
      launches_.kernels->reverse(gpu_, stage_.block, launches_.programs, launches_.shared, net_,
                                 walk_);
      collect(walk_.begin, end);
      walk_.cotangent = walk_.end_cotangent;
      if (walk_.end_state) walk_.start = walk_.end_state;
    }
  }

  // Adds up the sums of the blocks that no step before `begin` uses.
  void collect(int begin, int end) {
    if (walk_.sums.size == 0 || (stage_.tied && begin > 0)) return;
    const bool heun = stage_.scheme == Scheme::heun;
    Reduction r{};
    r.sums = walk_.sums;
    r.programs = launches_.programs;
    r.first = stage_.tied || begin == 0 ? 0 : begin + heun;
    for (int k = 0; k < stage_.count; ++k) {
      if (r.sums.offsets[k] < 0) continue;
      r.gradients[k] = io_.gradients[k];
      r.strides[k] = stride(stage_, io_.gradients, k, launches_.kernels->weight_bytes);
      r.elements[k] = stage_.elements(k);
    }
    launches_.kernels->reduce(gpu_, stage_.tied ? 1 : end + heun - r.first, r);
  }

  const Stage& stage_;
  const Reverse& io_;
  const Gpu& gpu_;
  const Launches& launches_;
  Arena arena_;
  ReverseWalk walk_{};
  Network net_;
  float *state_, *between_;  // where a launch leaves the state; the states between two anchors
};

}  // namespace

std::optional<Plan<Forward>> plan(const Stage& stage, const Forward& io, const Gpu& gpu) {
  const auto found = launches(stage, gpu, false);
  if (!found) return {};
  return Plan<Forward>{stage, io, gpu, *found};
}

std::optional<Plan<Reverse>> plan(const Stage& stage, const Reverse& io, const Gpu& gpu) {
  auto found = launches(stage, gpu, true);
  if (!found) return {};
  const int64_t size = layout_sums(stage, io).size * 4;
  if (!stage.tied && size > 0) {
    const int64_t fit = int64_t(gpu.cache / 2) / (size * found->programs);
    found->steps = int(std::clamp<int64_t>(fit, 1, stage.steps));
  }
  Plan<Reverse> plan{stage, io, gpu, *found};
  plan.workspace_bytes = Reverser(plan, nullptr).workspace_bytes();
  return plan;
}

template <>
void Plan<Forward>::run(void*) const {
  launches.kernels->walk(
      gpu, stage.block, launches.programs, launches.shared, network(stage, launches),
      {static_cast<const float*>(io.x), static_cast<float*>(io.y), static_cast<float*>(io.anchors),
       0, int(stage.steps), int(stage.anchor_every ? stage.anchor_every : stage.steps)});
}

template <>
void Plan<Reverse>::run(void* workspace) const {
  Reverser(*this, workspace).run();
}

}  // namespace resode
