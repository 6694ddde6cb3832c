// Loops over the numbers of a row, compiled for more than one processor: the build runs on every x86-64 machine, and
// where there are wider vectors they are used. The bits are the same: one multiplication and one addition per number,
// each rounded (no contraction, setup.py). Functions called by it are compiled with it (flatten).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "portable.h"

// Not under sanitizers, which are not there yet when the version is chosen, nor where nvcc compiles.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) && !defined(__CUDACC__)
#define HETMPI_CLONES __attribute__((target_clones("avx2", "default"), flatten))
#else
#define HETMPI_CLONES
#endif

namespace hetmpi {

// Asks for a row, which may be written then.
HETMPI_PREFETCHES void prefetch_row(const float* row, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(row + i, 1);
}

// Asks for a row that will only be read.
template <typename T>
HETMPI_PREFETCHES void prefetch_read(const T* row, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / sizeof(T)) __builtin_prefetch(row + i);
}

// Asks for numbers that follow the n values that are read now, in an array that is read once, from beginning to end;
// perhaps beyond its end, which does no harm. Processors do so by themselves, but stop at the end of every page.
HETMPI_PREFETCHES void prefetch_next(const float* values, int64_t n) {
  constexpr uintptr_t kAhead = 8192;  // bytes
  const uintptr_t next = reinterpret_cast<uintptr_t>(values) + kAhead;
  for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(reinterpret_cast<const void*>(next + sizeof(float) * i), 0, 0);
}

// sum += values
HETMPI_CLONES static inline void add(float* __restrict sum, const float* __restrict values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += values[i];
}

// sum = values, of which a negative zero becomes a positive one, as in a sum that begins with zero.
HETMPI_CLONES static inline void begin_sum(float* __restrict sum, const float* __restrict values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] = 0.0f + values[i];
}

// weight -= step * values
HETMPI_CLONES static inline void subtract(float* __restrict weight, float step, const float* __restrict values,
                                          int64_t n) {
  for (int64_t i = 0; i < n; ++i) weight[i] -= step * values[i];
}

// Both, in one pass over the values.
HETMPI_CLONES static inline void add_and_subtract(float* __restrict sum, float* __restrict weight, float step,
                                                  const float* __restrict values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    sum[i] += values[i];
    weight[i] -= step * values[i];
  }
}

// Whether no number is NaN or infinite: their exponents have all bits set.
HETMPI_CLONES static inline bool is_finite(const float* values, int64_t n) {
  constexpr uint32_t kExponent = 0x7f800000u;
  constexpr int64_t kBlock = 1024;  // looked at without a branch
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = n - begin < kBlock ? n : begin + kBlock;
    uint32_t found = 0;
    for (int64_t i = begin; i < end; ++i) {
      uint32_t bits;
      __builtin_memcpy(&bits, values + i, sizeof bits);
      found |= (bits & kExponent) == kExponent ? 1u : 0u;
    }
    if (found != 0) return false;
  }
  return true;
}

constexpr int32_t kRun = 64;  // values of a row that are added to one sum, before the next sum begins

// sums (num_rows, dim) of the values[i] with rows[i] = 0, 1, ..., one after the other; zeros without any. A row with
// more than kRun values has a sum of each kRun of them, which are added one after the other: a GPU computes them at the
// same time (cuda/row_sums.h). values (num_parts * m, dim), given as num_parts times m * dim numbers, `stride` apart.
inline void sum_by_row(const float* values, int64_t num_parts, int64_t m, int64_t stride, const int64_t* rows,
                       int64_t num_rows, int64_t dim, float* sums) {
  constexpr int64_t kAhead = 8;  // rows prefetched
  const int64_t n = num_parts * m;
  std::vector<uint8_t> nums(num_rows, 0);   // of each row: values in its last sum
  std::vector<int32_t> runs(num_rows, -1);  // of each row: the place of that sum in `later`, -1 if in sums
  const std::unique_ptr<float[]> later(new float[n / kRun * dim]);  // (..., dim)
  std::vector<int64_t> frequent;                                    // the rows with a sum in `later`
  for (int64_t part = 0, i = 0; part < num_parts; ++part)
    for (int64_t j = 0; j < m; ++j, ++i) {
      const int64_t row = rows[i];
      const float* from = values + part * stride + j * dim;
      if (i + kAhead < n) prefetch_row(sums + rows[i + kAhead] * dim, dim);
      prefetch_next(from, dim);
      float* to = runs[row] < 0 ? sums + row * dim : later.get() + runs[row] * dim;
      uint8_t& num = nums[row];
      if (num == kRun) {
        if (runs[row] < 0) {
          runs[row] = static_cast<int32_t>(frequent.size());
          frequent.push_back(row);
          to = later.get() + runs[row] * dim;
        } else {
          add(sums + row * dim, to, dim);
        }
        num = 0;
      }
      if (num++ == 0)
        begin_sum(to, from, dim);
      else
        add(to, from, dim);
    }
  for (int64_t row = 0; row < num_rows; ++row)
    if (nums[row] == 0) std::fill_n(sums + row * dim, dim, 0.0f);
  for (size_t k = 0; k < frequent.size(); ++k) add(sums + frequent[k] * dim, later.get() + k * dim, dim);
}

// out[i] = values[rows[i]]: values (m, dim), rows (n), out (n, dim).
inline void gather(const float* values, const int64_t* rows, int64_t n, int64_t dim, float* out) {
  constexpr int64_t kAhead = 16;  // rows prefetched
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) prefetch_read(values + rows[i + kAhead] * dim, dim);
    std::copy_n(values + rows[i] * dim, dim, out + i * dim);
  }
}

// out[rows[i]] += values[d] for offsets[d] <= i < offsets[d + 1], one after the other: values (n, dim), offsets (n +
// 1).
inline void spread_add(const float* values, const int64_t* offsets, const int64_t* rows, int64_t n, int64_t dim,
                       float* out) {
  constexpr int64_t kAhead = 8;  // rows prefetched
  const int64_t end = offsets[n];
  for (int64_t d = 0; d < n; ++d)
    for (int64_t i = offsets[d]; i < offsets[d + 1]; ++i) {
      if (i + kAhead < end) prefetch_row(out + rows[i + kAhead] * dim, dim);
      add(out + rows[i] * dim, values + d * dim, dim);
    }
}

}  // namespace hetmpi
