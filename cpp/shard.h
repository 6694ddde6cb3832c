// Shard: the rows one rank owns, in its RMA memory. Only the owner writes it.
#pragma once

#include <cstdint>

#include "row_init.h"
#include "row_optimizer.h"

namespace hetmpi {

struct Shard {
  float* weight;   // (num_rows, dim)
  float* state;    // (num_rows, state_dim)
  int64_t* clock;  // (num_rows) iterations that updated the row
  int64_t num_rows;
  int64_t dim;
  int64_t state_dim;

  void apply(int64_t row, const float* grad, const RowOptimizer& optimizer) {
    optimizer.apply(weight + row * dim, state + row * state_dim, grad);
    ++clock[row];
  }
};

}  // namespace hetmpi
