// The reverse pass: from x[N] and ∂L/∂x[N] back to ∂L/∂x[0] and every parameter's gradient, with
// the states reconstructed on the way. At each step a rule chooses p, where the VJP is taken, and
// the next state (x is x̃[n+1], φ and ψ are φ_n and ψ_n):
//
//     paper       p = x − h ψ(x);                           next state p
//     refined     the same, then order − 1 corrections;     next state x − h φ(p)
//     predicted   p = x − h φ̂, φ̂ extrapolated from the      next state x − h φ(p)
//                 last evaluations φ(p), and a correction
//                 for every evaluation that is missing
//     exact       p = x[n], an anchor or recomputed from the last one before it
//     recorded    p = x − Q, the increment as recorded;     next state p
//
// A correction is p ← x − h φ(p). Memory traffic per step: state and cotangent once in and once
// out, with `predicted` its history too, the step's weights once, their gradients once. `recorded`
// reads the codes, and makes no product but those that the VJP needs.

#pragma once

#include "recorder.h"
#include "schemes.h"
#include "worker.h"

namespace {

using resode::ReverseRule;

// p ← x − h Σ_i coefficient_i φ_i over the `count` newest evaluations, newest first: the value at
// the next point of the polynomial through them. Some panels of p.
template <class T>
void extrapolate(Matrix<T> p, const T* x, T h, const T* const* newest, int count, Share panels) {
  constexpr T coefficients[resode::kMaxOrder][resode::kMaxOrder] = {{1}, {2, -1}, {3, -3, 1}};
  const T* const c = coefficients[count - 1];
  const int64_t panel = p.rows * kPanel<T>;
  for (int64_t i = panels.begin * panel; i < panels.end * panel; i += kLanes<T>) {
    Vec<T> slope = c[0] * load(newest[0] + i);
    for (int k = 1; k < count; ++k) slope += c[k] * load(newest[k] + i);
    store(p.data + i, load(x + i) - h * slope);
  }
}

// The states that a reverse pass holds, one after the other: those of a segment, f(x̃), the history
// and the cotangent.
template <class T>
struct ReverseStates {
  bool in_result;   // the cotangent is: in grad_x
  int64_t segment;  // states that are kept at a time: those of a segment for `exact`, or one
  bool known;       // f(x̃) is kept if the previous step has computed it
  int64_t history;  // `predicted`: the last evaluations, a ring
  T* states;

  template <class P>
  ReverseStates(const P& pass, const resode::Reverse& io, Arena& arena)
      : in_result(io.grad_x && pass.lives_in_result()),
        segment(io.reverse_rule == ReverseRule::exact ? pass.s.anchor_every : 1),
        // With `paper` the state is p, where the VJP has just been taken: Heun's next step starts
        // with the same evaluation f_n(p), and so does Euler's if the block stays the same. But not
        // with remembered kinks, which are those of one evaluation.
        known(io.reverse_rule == ReverseRule::paper &&
              (pass.s.scheme == resode::Scheme::heun || pass.s.tied) && !io.signs),
        history(io.reverse_rule == ReverseRule::predicted ? io.order : 0),
        states(pass.states(arena, count())) {}

  int64_t count() const { return segment + known + history + !in_result; }
};

template <class T, class Scheme, ResidualBlock<T> Block>
class ReverseWorker : public Worker<T, Scheme, Block> {
 public:
  ReverseWorker(const Pass<T, Scheme, Block>& pass, const resode::Reverse& io,
                const ReverseStates<T>& layout, Team team)
      : Worker<T, Scheme, Block>(pass, team),
        pass(pass),
        s(pass.s),
        io(io),
        layout(layout),
        states(this->own(layout.states, layout.count())),
        cotangent(layout.in_result ? static_cast<T*>(io.grad_x) : states[layout.count() - 1]),
        known(layout.known ? states[layout.segment] : nullptr),
        h(runner.step),
        recorder(pass.s, io) {}

  void run() {
    runner.signs = const_cast<uint8_t*>(static_cast<const uint8_t*>(io.signs));
    runner.signs_known = true;
    this->read(cotangent, static_cast<const T*>(io.cotangent));
    if (io.reverse_rule != ReverseRule::exact && !s.records())
      this->read(state(), static_cast<const T*>(io.start));
    for (int64_t n = s.steps - 1; n >= 0 && !team.halts(); --n) {
      recorder.go_back(n);
      if (s.records()) {
        if (recorder.keeps(n))
          this->read(state(), static_cast<const T*>(io.anchors) + recorder.anchor());
      } else if (s.anchor_every && (n + 1 == s.steps || (n + 1) % s.anchor_every == 0)) {
        restart(n);
      }
      this->begin_reverse_step(n);
      this->for_each_tile([&](Share rows) { step(n, rows); });
      this->end_reverse_step(n);
      ++evaluations;
      is_known = known;
    }
    if (nonfinite >= 0) raise(*io.nonfinite, int32_t(nonfinite));
    if (io.grad_x) this->write(static_cast<T*>(io.grad_x), cotangent, runner.point);
  }

 private:
  using Worker<T, Scheme, Block>::runner;
  using Worker<T, Scheme, Block>::team;
  const Pass<T, Scheme, Block>& pass;
  const Stage& s;
  const resode::Reverse& io;
  const ReverseStates<T>& layout;
  const States<T> states;  // first those of a segment, last the cotangent
  T* const cotangent;      // g
  T* const known;
  const T h;
  Recorder<T> recorder;
  int64_t evaluations = 0;  // of φ at a point p, so far
  bool is_known = false;    // `known` holds the first evaluation of the next step
  int64_t nonfinite = -1;   // the first step on the way back whose point is not finite

  // x[n+1] is an anchor, or the end. `exact` fills in the states of the segment that leads to
  // it.
  void restart(int64_t n) {
    const T* const anchors = static_cast<const T*>(io.anchors);
    if (io.reverse_rule != ReverseRule::exact) {
      if (n + 1 == s.steps) return;
      is_known = false;
      return this->read(state(), pass.anchor(anchors, n + 1));
    }
    const int64_t begin = n - n % s.anchor_every;
    this->read(state(), begin ? pass.anchor(anchors, begin) : static_cast<const T*>(io.start));
    for (int64_t m = begin; m < n && !team.halts(); ++m) {
      this->begin_step(m);
      this->for_each_tile([&](Share rows) {
        const Matrix<T> x = pass.tile(recomputed(m), rows);
        Scheme::slope(runner, m, x, {{pass.tile(recomputed(m + 1), rows).data, x.data, h}});
      });
    }
  }

  T* state() const { return states[0]; }
  // Where a segment's state x[n] is.
  T* recomputed(int64_t n) const { return states[n % s.anchor_every]; }
  // Where the i-th evaluation φ(p) is.
  T* evaluation(int64_t i) const { return states[layout.segment + layout.known + i % io.order]; }

  void step(int64_t n, Share rows) {
    const Matrix<T> x = pass.tile(state(), rows), g = pass.tile(cotangent, rows);
    const Matrix<T> p = point(n, rows, x);
    if (io.nonfinite && nonfinite < 0 && !is_finite(p.part(runner.block.mine(p)))) nonfinite = n;
    T* const keep = known && n > 0 ? pass.tile(known, rows).data : nullptr;
    Update<T> next;
    if (io.reverse_rule == ReverseRule::refined || io.reverse_rule == ReverseRule::predicted)
      next.first = {x.data, x.data, -h};
    if (io.reverse_rule == ReverseRule::predicted)
      next.second.out = pass.tile(evaluation(evaluations), rows).data;
    Scheme::trace(runner, n, p, keep, next);
    Scheme::vjp(runner, n, p, g, n > 0 || io.grad_x);
  }

  Matrix<T> point(int64_t n, Share rows, Matrix<T> x) {
    if (io.reverse_rule == ReverseRule::exact) return pass.tile(recomputed(n), rows);
    if (io.reverse_rule == ReverseRule::recorded) {
      if (!recorder.keeps(n)) recorder.undo(n, x, rows, runner.block);
      return x;
    }
    const Matrix<T> p{io.reverse_rule == ReverseRule::paper ? x.data : runner.point, x.rows,
                      x.columns};
    const Update<T> to_p{{p.data, x.data, -h}};
    int64_t corrections = io.reverse_rule == ReverseRule::refined ? io.order - 1 : 0;
    int64_t available = 0;
    if (io.reverse_rule == ReverseRule::predicted) {
      available = min(evaluations, io.order);
      corrections = io.order - available;
    }
    if (available > 0) {
      const T* newest[resode::kMaxOrder];
      for (int64_t i = 0; i < available; ++i)
        newest[i] = pass.tile(evaluation(evaluations - 1 - i), rows).data;
      extrapolate(p, x.data, h, newest, available, runner.block.mine(p));
      runner.block.meet();
    } else {
      Scheme::reverse_slope(runner, n, x, is_known ? pass.tile(known, rows).data : nullptr, to_p);
    }
    for (; corrections > 0; --corrections) Scheme::slope(runner, n, p, to_p);
    return p;
  }
};

template <class T, class Scheme, ResidualBlock<T> Block>
size_t reverse(const Stage& s, const resode::Reverse& io, void* workspace, resode::Stop stop) {
  Arena arena(workspace);
  const Pass<T, Scheme, Block> pass(s, arena, io.gradients);
  const ReverseStates<T> layout(pass, io, arena);
  if (!workspace) return arena.used();

  for (int t = 0; t < pass.tiling.threads; ++t) {
    pass.walked[t].value = s.steps;
    pass.written[t].value = s.steps;
  }
  Halt halt(s, stop);
  Team::run(pass.tiling.threads, halt,
            [&](Team team) { ReverseWorker<T, Scheme, Block>(pass, io, layout, team).run(); });
  return arena.used();
}

}  // namespace
