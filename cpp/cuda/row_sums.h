// Sums of gradients by row on a GPU, with the bits of sum_by_row() on the CPU (vectors.h).
//
// A stable sort by row makes the occurrences of a row consecutive. Lanes then add those of a run, without memory for
// each occurrence, and the runs of a row at the same time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/cuda_cache.h"
#include "portable.h"
#include "vectors.h"

namespace hetmpi {

// The n occurrences of a batch by row. A view of memory.
struct RowOrder {
  struct Range {
    int32_t begin, end;
  };

  int32_t* places;   // (n): places in the batch, rising within a row
  int32_t* windows;  // (num_windows): row of the first of each kRun places
  Range* ranges;     // (num_rows): each row's part of places

  HETMPI_SHARED static int64_t num_windows(int64_t n) { return (n + kRun - 1) / kRun; }

  // Of the memory, in numbers.
  static int64_t size(int64_t n, int64_t num_rows) { return n + num_windows(n) + 2 * num_rows; }

  RowOrder(int32_t* memory, int64_t n)
      : places(memory), windows(places + n), ranges(reinterpret_cast<Range*>(windows + num_windows(n))) {}

  // That places[i] is of this row. is_first, is_last: of those of the row.
  HETMPI_SHARED void set(int64_t i, int32_t row, bool is_first, bool is_last) const {
    if (is_first) ranges[row].begin = static_cast<int32_t>(i);
    if (is_last) ranges[row].end = static_cast<int32_t>(i + 1);
    if (i % kRun == 0) windows[i / kRun] = row;
  }
};

// Sorts values (n) by their lowest `bits`, with their places. unsorted (n): scratch memory. memory: more of it, of
// num_bytes; null to learn num_bytes. All arrays of these calls are in GPU memory, their n is below 2^31.
void sort_places(const int64_t* values, int64_t n, int bits, int64_t* sorted, int32_t* places, int32_t* unsorted,
                 void* memory, size_t& num_bytes, Stream stream);

// The order of rows (n) in [0, num_rows). memory: of scratch_bytes(n, num_rows).
void order_rows(const int64_t* rows, int64_t n, int64_t num_rows, const RowOrder& order, void* memory, int device,
                Stream stream);
int64_t scratch_bytes(int64_t n, int64_t num_rows, int device);

// sums (num_rows, dim) of values (num_parts * m, dim), as sum_by_row(). n = num_parts * m. later (num_windows(n), dim):
// scratch memory.
void sum_by_row_on_gpu(const float* values, int64_t num_parts, int64_t m, int64_t stride, const RowOrder& order,
                       int64_t num_rows, int64_t dim, float* later, float* sums, int device, Stream stream);

}  // namespace hetmpi
