// GpuRows: all rows of a table of one rank, in a GPU's memory. A step reads and updates them where they are, in the
// model's stream: no row is copied to the host or from it, and the host waits for nothing but the step before.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "client/device_rows.h"
#include "cuda/cuda_cache.h"
#include "owner/partition.h"

namespace hetmpi {

class GpuRows : public DeviceRows {
 public:
  // As of Shard (owner/shard.h), in GPU memory.
  struct Arrays {
    float *weight, *state;
    int32_t* clock;
    uint8_t* touched;
  };

  // The model on the same GPU.
  struct Model {
    std::function<ModelRows(int64_t n)> rows;                              // memory (n, dim) for the model's stream
    std::function<Stream()> stream;                                        // in which the model computes
    std::function<void(const Keys& keys, const ModelRows& grads)> refuse;  // throws for gradients that are not finite
  };

  // arrays: the caller keeps them. Keys are in pinned memory.
  GpuRows(const Partition& partition, Arrays arrays, int64_t dim, int64_t state_dim, int device, Model model);
  ~GpuRows() override;

  ModelRows read(const KeysOfCall& keys) override;
  // Keeps the gradients until they are checked.
  void apply(const KeysOfCall& keys, const ModelRows& grads, const RowOptimizer& rule) override;
  void check() override;
  void copy(const Keys& keys, float* out) override;

 private:
  struct Memory;

  // The model's stream, after all that was given to another one before.
  Stream enter();
  void read(const Keys& keys, float* out, Stream stream) const;

  Partition partition_;
  Arrays arrays_;
  int64_t dim_, state_dim_;
  int device_;
  Model model_;
  Stream stream_;  // of the last call
  std::unique_ptr<Memory> memory_;
  std::pair<KeysOfCall, ModelRows> last_;  // of the step that is not checked yet
};

}  // namespace hetmpi
