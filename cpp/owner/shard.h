// Shard: the rows one rank owns, in memory that its node shares. Only the owner writes it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cache/cache_decisions.h"
#include "owner/directory.h"
#include "owner/push_history.h"
#include "owner/row_file.h"
#include "owner/row_optimizer.h"
#include "vectors.h"

namespace hetmpi {

// Other ranks of the node read clocks while the owner writes them. A row read after its clock is at least that recent.
inline int32_t load_clock(const int32_t* clock) { return __atomic_load_n(clock, __ATOMIC_ACQUIRE); }

struct Shard {
  float* weight;     // (num_rows, dim)
  float* state;      // (num_rows, state_dim)
  int32_t* clock;    // (num_rows) iterations that updated the row; 32 bits, because cached reads transfer clocks
  uint8_t* touched;  // (num_rows) 1 for each row that was updated; its user resets it
  int64_t num_rows;
  int64_t dim;
  int64_t state_dim;
  float* mean_square;  // (num_rows) of each state, for cache lines; null: not kept
  const Directory* directory;
  RowFile* file = nullptr;  // of the rows, where weight and state are null

  // Asks for rows (n), which will be written.
  void want(const int64_t* rows, int64_t n) const {
    if (file != nullptr) file->want(rows, n);
  }

  // Asks for a row, which will be written.
  HETMPI_PREFETCHES void prefetch(int64_t row) const {
    if (file == nullptr) {
      prefetch_row(weight + row * dim, dim);
      prefetch_row(state + row * state_dim, state_dim);
    }
    __builtin_prefetch(clock + row, 1);
    __builtin_prefetch(touched + row, 1);
  }

  // One iteration's gradient (dim), summed over all ranks.
  void apply(int64_t row, const float* grad, const RowOptimizer& optimizer) {
    const Row to = to_write(row);
    optimizer.apply(to.weight, to.state, grad);
    touched[row] = 1;
    __atomic_store_n(clock + row, clock[row] + 1, __ATOMIC_RELEASE);  // after the row, as in apply_sum
  }

  // One rank's sum over iterations of these steps, the last of which is its `origin_clock`-th of this row; with
  // kUnknownClock all of them are new. The row is written before its clock: a reader that sees the clock and then reads
  // the row sees this update.
  void apply_sum(int64_t row, const Gradient& push, const Steps& steps, int32_t origin_clock,
                 const RowOptimizer& optimizer, PushHistory& history) {
    const auto count = static_cast<int32_t>(push.count);
    const int32_t advance = origin_clock == kUnknownClock ? count : std::max(0, origin_clock - clock[row]);
    const Row to = to_write(row);
    if (optimizer.is_plain())
      optimizer.apply(to.weight, to.state, push.sum);
    else
      history.apply(row, to.weight, to.state, push, steps, optimizer);
    if (mean_square != nullptr) mean_square[row] = optimizer.mean_square(to.state);
    touched[row] = 1;
    __atomic_store_n(clock + row, clock[row] + advance, __ATOMIC_RELEASE);
  }

 private:
  struct Row {
    float *weight, *state;
  };

  Row to_write(int64_t row) const {
    if (file == nullptr) return {weight + row * dim, state + row * state_dim};
    float* const found = file->to_write(row);
    return {found, found + dim};
  }
};

}  // namespace hetmpi
