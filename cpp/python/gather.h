// The loop of gather(): copies rows of one array to given positions of another.
#pragma once

#include <cstdint>
#include <cstring>

#include "python/arrays.h"

namespace hetmpi {

// out[order[i]] = from[rows[i]]. copy: copies one row of `width` numbers; run: calls the loop, without the GIL.
template <typename T, typename Copy, typename Run>
void gather_with(const Array<T>& from, const Array<int64_t>& rows, Array<T>& out, const Array<int64_t>& order,
                 ssize_t width, Copy copy, Run run) {
  const ssize_t n = rows.shape(0);
  check_shape(order, "order", {n});
  const T* source = from.data();
  const int64_t *row = rows.data(), *position = order.data();
  T* to = out.mutable_data();
  const ssize_t num_rows = from.shape(0), num_out = out.shape(0);
  py::gil_scoped_release release;
  check_in(row, n, num_rows, "rows");
  check_in(position, n, num_out, "order");
  run([&] {
    constexpr ssize_t kAhead = 8;  // rows prefetched: a shard is far larger than the caches
    for (ssize_t i = 0; i < n; ++i) {
      if (i + kAhead < n) __builtin_prefetch(source + row[i + kAhead] * width);
      copy(to + position[i] * width, source + row[i] * width);
    }
  });
}

// Runs the loop of gather_with if `from` is not written concurrently.
inline constexpr auto kAtOnce = [](auto loop) { loop(); };

template <typename Run>
void gather_rows(const Array<float>& from, const Array<int64_t>& rows, Array<float>& out, const Array<int64_t>& order,
                 Run run) {
  const ssize_t dim = from.shape(1);
  check_shape(out, "out", {-1, dim});
  const auto copy = [dim](float* to, const float* row) { std::memcpy(to, row, dim * sizeof(float)); };
  gather_with(from, rows, out, order, dim, copy, run);
}

}  // namespace hetmpi
