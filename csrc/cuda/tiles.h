// Which thread of a launch has which part of a tensor.
//
// A tile is a rectangle of positions × channels of one group. Each of its threads has V neighbours:
// V channels of a position where channels adjoin, else V positions of a channel. Consecutive
// threads have consecutive parts. CTA (x, y) of a launch goes through the tiles x, x + gridDim.x, …
// of column y, so that a thread keeps its channels.

#pragma once

#include <algorithm>
#include <bit>

#include "lanes.h"

namespace resode {

constexpr int kThreads = 256;
constexpr int kAbreast = 32;  // threads of a tile along the adjoining dimension, if it is that long
// Fills a GPU a few times; with more CTAs a thread would read the numbers of its channels (bias,
// mean, …) for fewer tiles.
constexpr int kCtasPerProcessor = 16;

struct Tiles {
  Rows rows;
  int lanes;                                 // V
  int channel_threads, position_threads;     // powers of two
  unsigned tiles_per_group, count, columns;  // count: tiles of a column

  Tiles(const Rows& rows, int lanes) : rows(rows), lanes(lanes) {
    const int64_t channels = rows.channels_adjoin ? rows.channels / lanes : rows.channels;
    const int64_t positions = rows.channels_adjoin ? rows.positions : rows.positions / lanes;
    const auto at_most = [](int most, int64_t n) {
      return int(std::bit_ceil(uint64_t(std::clamp<int64_t>(n, 1, most))));
    };
    const int most = rows.channels_adjoin ? kAbreast : kThreads / at_most(kAbreast, positions);
    channel_threads = at_most(most, channels);
    position_threads = kThreads / channel_threads;
    tiles_per_group = unsigned((positions + position_threads - 1) / position_threads);
    count = unsigned(rows.groups) * tiles_per_group;
    columns = unsigned((channels + channel_threads - 1) / channel_threads);
  }

  // At least one CTA for each column, and not many more than `ctas` in all.
  dim3 grid(unsigned ctas) const {
    return dim3(std::clamp((ctas + columns - 1) / columns, 1u, std::max(count, 1u)), columns);
  }
  dim3 grid(const Gpu& gpu) const { return grid(kCtasPerProcessor * gpu.processors); }
};

// What a thread has of every tile.
template <int V>
struct Part {
  const Tiles& tiles;
  int position_thread;
  int64_t channel;     // of the first of V lanes
  int channel_stride;  // from one lane to the next: 1 where channels adjoin, else 0

  __device__ __forceinline__ explicit Part(const Tiles& tiles) : tiles(tiles) {
    const bool adjoin = tiles.rows.channels_adjoin;
    const int abreast = adjoin ? tiles.channel_threads : tiles.position_threads;
    const int fast = threadIdx.x % abreast, slow = threadIdx.x / abreast;
    position_thread = adjoin ? slow : fast;
    const int64_t column = int64_t(blockIdx.y) * tiles.channel_threads;
    channel = adjoin ? (column + fast) * V : column + slow;
    channel_stride = adjoin;
  }

  __device__ __forceinline__ bool inside() const { return channel < tiles.rows.channels; }

  // Where the lanes of a position begin.
  __device__ __forceinline__ int64_t offset(int64_t group, int64_t position) const {
    const Rows& rows = tiles.rows;
    return rows.channels_adjoin ? (group * rows.positions + position) * rows.channels + channel
                                : (group * rows.channels + channel) * rows.positions + position;
  }

  // Calls f(offset) for the thread's part of every tile of its CTA.
  template <class F>
  __device__ __forceinline__ void for_each(F f) const {
    if (!inside()) return;
    for (unsigned tile = blockIdx.x; tile < tiles.count; tile += gridDim.x) {
      const unsigned group = tile / tiles.tiles_per_group;
      const unsigned of_group = tile - group * tiles.tiles_per_group;
      int64_t position = int64_t(of_group) * tiles.position_threads + position_thread;
      if (!tiles.rows.channels_adjoin) position *= V;
      if (position < tiles.rows.positions) f(offset(group, position));
    }
  }
};

}  // namespace resode
