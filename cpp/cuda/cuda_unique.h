// Unique keys of a batch on a GPU, with the result of KeyIndex (key_index.h) on the CPU.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/cuda_cache.h"

namespace hetmpi {

class CudaUnique {
 public:
  explicit CudaUnique(int device = 0);
  ~CudaUnique();

  // ids (n) in [0, limit) -> keys in order of first appearance, index (n) with ids[i] == keys[index[i]], and the order
  // of the ids by key: of_order, RowOrder::size(n, n) numbers (row_sums.h). keys has room for n. All in GPU memory or
  // pinned. Synchronous; returns the number of keys. One call at a time.
  int64_t unique(const int64_t* ids, int64_t n, int64_t limit, int64_t* keys, int64_t* index, int32_t* of_order,
                 Stream stream);

 private:
  struct Memory;
  std::unique_ptr<Memory> memory_;
};

}  // namespace hetmpi
