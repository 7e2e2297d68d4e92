// Shuffles, ldmatrix and mma. Layouts are those of the PTX manual, where g = lane / 4 and
// t = lane % 4:
//
//   m16n8k16   a[i]: row g + 8 (i % 2), columns 2t + 8 (i / 2) and the next
//              b[i]: rows 2t + 8 i and the next, column g
//   m16n8k8    a[i]: row g + 8 (i % 2), column t + 4 (i / 2);   b[i]: row t + 4 i, column g
//   both       d[i]: row g + 8 (i / 2), column 2t + i % 2

#include "warp.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cstring>

namespace emulation {
namespace {

constexpr unsigned kAll = 0xffffffffu;

void shuffle_together(Lane* lanes, int count) {
  uint32_t values[kWarp];
  std::memset(values, 0xff, sizeof(values));  // a lane that is not there has no number
  for (int i = 0; i < count; ++i) values[i] = lanes[i].shuffle.value;
  for (int i = 0; i < count; ++i) lanes[i].shuffle.value = values[lanes[i].shuffle.source];
}

template <bool transposed>
void rows_together(Lane* lanes, int count) {
  if (count != kWarp) fail("ldmatrix needs whole warps");
  const uint16_t* rows[kWarp];
  for (int i = 0; i < kWarp; ++i) {
    rows[i] = static_cast<const uint16_t*>(lanes[i].matrix.row);
    if (reinterpret_cast<uintptr_t>(rows[i]) % 16) fail("a row of ldmatrix is not aligned");
    if (!in_shared(rows[i], 16)) fail("a row of ldmatrix is not in the block's shared memory");
  }
  for (int i = 0; i < kWarp; ++i)
    for (int matrix = 0; matrix < 4; ++matrix)
      for (int half = 0; half < 2; ++half)
        lanes[i].matrix.rows[2 * matrix + half] =
            rows[8 * matrix + (transposed ? 2 * (i % 4) + half : i / 4)];
}

// The number `which` of a register.
template <Product product>
float number(uint32_t bits, int which) {
  if constexpr (product == Product::f16) return half_to_float(uint16_t(bits >> 16 * which));
  if constexpr (product == Product::bf16) return bfloat16_to_float(uint16_t(bits >> 16 * which));
  return std::bit_cast<float>(bits & ~0x1fffu);  // tensor cores read 19 bits
}

template <Product product>
void multiply_together(Lane* lanes, int count) {
  if (count != kWarp) fail("mma needs whole warps");
  constexpr int each = product == Product::tf32 ? 1 : 2;  // numbers of a register
  constexpr int depth = 8 * each;
  float a[16][depth], b[depth][8], d[16][8];
  for (int lane = 0; lane < kWarp; ++lane) {
    const auto& own = lanes[lane].product;
    int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      d[g + 8 * (i / 2)][2 * t + i % 2] = own.d[i];
      for (int k = 0; k < each; ++k)
        a[g + 8 * (i % 2)][each * (t + 4 * (i / 2)) + k] = number<product>(own.a[i], k);
    }
    for (int i = 0; i < 2; ++i)
      for (int k = 0; k < each; ++k) b[each * (t + 4 * i) + k][g] = number<product>(own.b[i], k);
  }
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < depth; ++k)
      for (int n = 0; n < 8; ++n) d[m][n] += a[m][k] * b[k][n];
  for (int lane = 0; lane < kWarp; ++lane)
    for (int i = 0; i < 4; ++i)
      lanes[lane].product.d[i] = d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
}

}  // namespace

uint32_t shuffle(unsigned mask, uint32_t value, int source, Place place) {
  Lane lane{};
  lane.shuffle = {value, source};
  meet_in_warp(mask, lane, shuffle_together, place);
  return lane.shuffle.value;
}

std::array<const uint16_t*, 8> matrix_rows(const void* row, bool transposed, Place place) {
  Lane lane{};
  lane.matrix.row = row;
  meet_in_warp(kAll, lane, transposed ? rows_together<true> : rows_together<false>, place);
  return std::to_array(lane.matrix.rows);
}

void mma(Product product, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
         Place place) {
  Lane lane;
  for (int i = 0; i < 4; ++i) lane.product.d[i] = d[i], lane.product.a[i] = a[i];
  for (int i = 0; i < 2; ++i) lane.product.b[i] = b[i];
  meet_in_warp(kAll, lane,
               product == Product::f16    ? multiply_together<Product::f16>
               : product == Product::bf16 ? multiply_together<Product::bf16>
                                          : multiply_together<Product::tf32>,
               place);
  for (int i = 0; i < 4; ++i) d[i] = lane.product.d[i];
}

}  // namespace emulation
