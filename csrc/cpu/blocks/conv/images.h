// Where pixels are. The pixels of a batch are the rows of a Matrix, image by image and line by
// line; a convolution works on a band of them at a time, painted on a canvas with zeros around it.

#pragma once

#include "../../core/matrix.h"
#include "../block.h"

namespace {

constexpr int kPoints = 16;  // of a patch, for windows of 3 × 3 (winograd.h)

// A window of size × size pixels, 1 or 3, on images of height × width.
struct Window {
  int64_t height, width;
  int size;

  int64_t rim() const { return size / 2; }
  int64_t patch() const { return size == 3 ? 2 : 1; }  // results on a side of a patch
  int64_t points() const { return size == 3 ? kPoints : 1; }
  int64_t patches(int64_t length) const { return ceil_div(length, patch()); }
};

inline Window window_of(const Stage& s, int l) {
  return {s.height, s.width, int(s.convolutions[l].size)};
}

// The most channels that a convolution of the block results in, padded.
template <class T>
int64_t max_channels(const Stage& s) {
  int64_t channels = 0;
  for (int l = 0; l < s.layers; ++l) channels = max(channels, s.convolutions[l].out);
  return padded<T>(channels);
}

// Some pixels of a batch: `lines` lines of each of `images` images, from line `top` of image
// `first` on. Either whole images, or a band of one that begins with a whole patch.
struct Band {
  Window window;
  int64_t first, images, top, lines;

  int64_t pixels() const { return images * lines * window.width; }
  int64_t begin() const { return (first * window.height + top) * window.width; }
  int64_t patches() const { return images * window.patches(lines) * window.patches(window.width); }
};

// The pixels of a band in whole patches and with a rim of zeros, or of the pixels around the band.
template <class T>
struct Canvas {
  T* data;
  Band band;
  int64_t channels;

  // From one line to the next: the zeros right of a line are those left of the next.
  int64_t pitch() const { return whole(band.window.width) + band.window.rim(); }
  int64_t lines() const { return whole(band.lines) + 2 * band.window.rim(); }
  int64_t positions() const { return band.images * lines() * pitch() + band.window.rim(); }
  int64_t panels() const { return ceil_div(channels, kPanel<T>); }
  int64_t size() const { return positions() * panels() * kPanel<T>; }

  // The upper left pixel that a patch's results depend on.
  T* corner(int64_t panel, int64_t image, int64_t patch_line) const {
    const int64_t line = image * lines() + patch_line * band.window.patch();
    return data + (panel * positions() + line * pitch()) * kPanel<T>;
  }

  // Calls paint(panel, pixel, to) for every line that lies on an image: it writes the line's
  // `width` pixels, which begin at row `pixel` of the batch. Everything else becomes zero.
  template <class Paint>
  void fill(Paint paint) const {
    const Window w = band.window;
    for (int64_t j = 0; j < panels(); ++j) {
      T* to = corner(j, 0, 0);
      for (int64_t image = band.first; image < band.first + band.images; ++image)
        for (int64_t line = 0; line < lines(); ++line) {
          const int64_t y = band.top + line - w.rim();
          to = zeros(to, w.rim());
          if (y < 0 || y >= w.height) {
            to = zeros(to, whole(w.width));
          } else {
            paint(j, (image * w.height + y) * w.width, to);
            to = zeros(to + w.width * kPanel<T>, whole(w.width) - w.width);
          }
        }
      zeros(to, w.rim());
    }
  }

 private:
  int64_t whole(int64_t length) const { return band.window.patches(length) * band.window.patch(); }

  static T* zeros(T* to, int64_t pixels) {
    memset(to, 0, pixels * kPanel<T> * sizeof(T));
    return to + pixels * kPanel<T>;
  }
};

// How a layer's images are cut into bands: several whole images, or lines of one.
struct Bands {
  Band largest;

  // Bytes that the points of a band take; patches that a matrix product should have at least, and
  // at most: sums over more of them would lose digits.
  static constexpr int64_t kBytes = 256 << 10, kMinPatches = 64, kMaxPatches = 256;

  template <class T>
  static Bands of(Window w, int64_t channels) {
    const int64_t patch_bytes = w.points() * padded<T>(channels) * int64_t(sizeof(T));
    const int64_t patches = max(kMinPatches, min(kMaxPatches, kBytes / patch_bytes));
    const int64_t across = w.patches(w.width), image = w.patches(w.height) * across;
    if (image <= patches) return {{w, 0, patches / image, 0, w.height}};
    const int64_t lines = max(1, patches / across);
    return {{w, 0, 1, 0, min(w.height, lines * w.patch())}};
  }

  int64_t count(int64_t images) const {
    return ceil_div(images, largest.images) * ceil_div(largest.window.height, largest.lines);
  }

  template <class F>
  void for_each(int64_t images, F f) const {
    const Window w = largest.window;
    for (int64_t i = 0; i < images; i += largest.images)
      for (int64_t y = 0; y < w.height; y += largest.lines)
        f(Band{w, i, min(largest.images, images - i), y, min(largest.lines, w.height - y)});
  }
};

}  // namespace
