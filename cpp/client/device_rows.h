// DeviceRows: all rows of a table of one rank, in the memory of the processor that computes the model
// (cuda/gpu_rows.h).
#pragma once

#include "client/keys.h"
#include "client/lines.h"
#include "owner/row_optimizer.h"

namespace hetmpi {

class DeviceRows {
 public:
  virtual ~DeviceRows() = default;

  // The rows of keys.
  virtual ModelRows read(const KeysOfCall& keys) = 0;

  // Applies the gradients (n, dim) of one step. REQUIRES: those of the step before are checked.
  virtual void apply(const KeysOfCall& keys, const ModelRows& grads, const RowOptimizer& rule) = 0;

  // Throws if the gradients of the last step were NaN or infinite, which have changed nothing.
  virtual void check() = 0;

  // Copies the rows of keys to out (n, dim) in host memory.
  virtual void copy(const Keys& keys, float* out) = 0;
};

}  // namespace hetmpi
