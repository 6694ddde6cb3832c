// The loop of gather(): copies rows of one array to given positions of another.
#pragma once

#include <cstdint>
#include <cstring>

#include "owner/shard.h"
#include "python/arrays.h"
#include "vectors.h"

namespace hetmpi {

// out[order[i]] = from[rows[i]] for n rows, checked; order null: 0, 1, ... copy: copies one row of `width` numbers;
// run: calls the loop.
template <typename T, typename Copy, typename Run>
void gather_part(const T* from, ssize_t num_rows, const int64_t* rows, T* out, ssize_t num_out, const int64_t* order,
                 ssize_t n, ssize_t width, Copy copy, Run run) {
  check_in(rows, n, num_rows, "row numbers");
  if (order != nullptr) check_in(order, n, num_out, "order");
  run([&] {
    constexpr ssize_t kAhead = 16;  // rows prefetched: a shard is far larger than the caches
    for (ssize_t i = 0; i < n; ++i) {
      if (i + kAhead < n) prefetch_read(from + rows[i + kAhead] * width, width);
      copy(out + (order == nullptr ? i : order[i]) * width, from + rows[i] * width);
    }
  });
}

// Runs the loop of gather_part if `from` is not written concurrently.
inline constexpr auto kAtOnce = [](auto loop) { loop(); };

// Copies a row of `dim` numbers.
inline auto row_copy(ssize_t dim) {
  return [dim](float* to, const float* row) { std::memcpy(to, row, dim * sizeof(float)); };
}

// Copies a clock that another thread or rank may be writing.
inline constexpr auto kClockCopy = [](int32_t* to, const int32_t* from) { *to = load_clock(from); };

}  // namespace hetmpi
