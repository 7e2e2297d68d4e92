// What the two passes do with recorded increments: where those of a step lie, and when a state is
// kept instead.

#pragma once

#include "../core/recording.h"
#include "pass.h"

namespace {

template <class T>
class Recorder {
 public:
  // At the beginning of a pass: forward at step 0, reverse behind step N − 1.
  Recorder(const Stage& s, const resode::Forward& io)
      : s(s), codes(static_cast<uint8_t*>(io.codes)), scales(static_cast<uint16_t*>(io.scales)) {}
  Recorder(const Stage& s, const resode::Reverse& io)
      : s(s),
        codes(const_cast<uint8_t*>(static_cast<const uint8_t*>(io.codes))),
        scales(const_cast<uint16_t*>(static_cast<const uint16_t*>(io.scales))) {
    for (int64_t n = 0; s.records() && n < s.steps; ++n) go_on(n);
  }

  // Whether the state x̂[n] is kept, and where among the anchors.
  bool keeps(int64_t n) const { return s.records() && !s.bits_of(n); }
  int64_t anchor() const { return kept * s.rows * s.dim; }

  // x̂[n] ← x̂[n+1], of some rows, by this thread's share of the groups
  template <class Block>
  void record(int64_t n, Matrix<T> x, Matrix<T> estimate, Share rows, Block& block) const {
    const Share mine = block.share(groups_of(s.dim));
    if (const int bits = s.bits_of(n)) {
      ::record(InPanels<T>{x}, InPanels<T>{estimate}, InPanels<T>{estimate}, at(bits, rows), bits,
               mine);
    } else if (n + 1 < s.steps) {
      const Matrix<T> from = x.part(block.mine(x));
      memcpy(estimate.data + (from.data - x.data), from.data, from.size() * sizeof(T));
    }
  }

  // x̂[n+1] ← x̂[n], likewise
  template <class Block>
  void undo(int64_t n, Matrix<T> estimate, Share rows, Block& block) const {
    const int bits = s.bits_of(n);
    ::undo(InPanels<T>{estimate}, InPanels<T>{estimate}, at(bits, rows), bits,
           block.share(groups_of(s.dim)));
    block.meet();
  }

  // From step n to the next, and back.
  void go_on(int64_t n) { go(n, 1); }
  void go_back(int64_t n) { go(n, -1); }

 private:
  const Stage& s;
  uint8_t* codes;    // of the current step
  uint16_t* scales;  // likewise
  int64_t kept = 0;  // states before

  void go(int64_t n, int64_t sign) {
    if (!s.records()) return;
    const int bits = s.bits_of(n);
    if (!bits) {
      kept += sign;
      return;
    }
    codes += sign * s.rows * code_bytes(s.dim, bits);
    scales += sign * s.rows * groups_of(s.dim);
  }

  Recorded at(int bits, Share rows) const {
    return {codes + rows.begin * code_bytes(s.dim, bits), scales + rows.begin * groups_of(s.dim)};
  }
};

}  // namespace
