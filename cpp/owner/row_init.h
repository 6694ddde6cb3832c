// Initial values of rows: normal numbers that depend only on (seed, key, column), so that a row starts the same for any
// number of ranks, any partition, and any order of arrival.
#pragma once

#include <cmath>
#include <cstdint>

#include "key_index.h"

namespace hetmpi {

// Two independent standard normal numbers from one 64-bit draw (Box and Muller 1958).
inline void normal_pair(uint64_t draw, float* first, float* second) {
  const float u = (static_cast<float>(draw >> 40) + 0.5f) * 0x1p-24f;  // (0, 1)
  const float turn = static_cast<float>(draw & 0xffffffu) * 0x1p-24f;  // [0, 1)
  const float radius = std::sqrt(-2.0f * std::log(u));
  const float angle = 6.2831853f * turn;
  *first = radius * std::cos(angle);
  *second = radius * std::sin(angle);
}

// row (dim) = std * normal(seed, key, column)
inline void init_row(float* row, int64_t dim, int64_t key, uint64_t seed, float std) {
  const uint64_t stream = mix64(seed ^ mix64(static_cast<uint64_t>(key) + 0x9e3779b97f4a7c15ULL));
  for (int64_t d = 0; d < dim; d += 2) {
    float first, second;
    normal_pair(mix64(stream + static_cast<uint64_t>(d) * 0x9e3779b97f4a7c15ULL), &first, &second);
    row[d] = std * first;
    if (d + 1 < dim) row[d + 1] = std * second;
  }
}

}  // namespace hetmpi
