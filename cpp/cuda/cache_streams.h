// CacheStreams: the two CUDA streams of a cache. Decisions about lines are made in one, which waits for no gradient but
// where drift is limited, so that the host can wait for a decision while the model computes; rows and sums are moved in
// the other, in the order of the decisions. Included only by .cu files.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>

#include "cuda/cuda_cache.h"
#include "cuda/events.h"
#include "cuda/memory_pool.h"

namespace hetmpi {

class CacheStreams {
 public:
  // The caller keeps the streams, which may be one.
  CacheStreams(int device, Stream deciding, Stream moving)
      : decided(device),
        moved(device),
        gpu_memory(MemoryPool::of_gpu(device)),
        host_memory(MemoryPool::of_host(device)),
        deciding_(static_cast<cudaStream_t>(deciding)),
        moving_(static_cast<cudaStream_t>(moving)) {}

  ~CacheStreams() {
    for (const cudaStream_t stream : {deciding_, moving_})  // kernels use what is kept
      if (cudaStreamSynchronize(stream) != cudaSuccess) cudaGetLastError();
  }

  cudaStream_t deciding() const { return deciding_; }
  cudaStream_t moving() const { return moving_; }

  // GPU memory for what decisions tell moves, until the next record of `moved` has happened.
  template <typename T>
  T* snapshot(int64_t n) {
    const std::shared_ptr<void> memory = gpu_memory->take(n * sizeof(T));
    moved.keep(memory);
    return static_cast<T*>(memory.get());
  }

  // What is moved from now on follows what was decided.
  void move_after_decisions() {
    if (deciding_ != moving_) decided.hand_over(deciding_, moving_, true);
  }
  void decide_after_moves() {
    if (deciding_ != moving_) moved.hand_over(moving_, deciding_, true);
  }

  void await_decisions() {
    HETMPI_CHECK(cudaStreamSynchronize(deciding_));
    decided.collect_all();
  }

  StreamEvents decided, moved;
  const std::shared_ptr<MemoryPool> gpu_memory, host_memory;

 private:
  cudaStream_t deciding_, moving_;
};

}  // namespace hetmpi
