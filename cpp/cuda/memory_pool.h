// MemoryPool: blocks of memory by size, powers of two, which are used again. Thread-safe; freed when the last block of
// it goes, which may outlive its maker. Included only by .cu files.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/device.h"

namespace hetmpi {

class MemoryPool : public std::enable_shared_from_this<MemoryPool> {
 public:
  using Allocate = cudaError_t (*)(void**, size_t);
  using Free = cudaError_t (*)(void*);

  static std::shared_ptr<MemoryPool> of_gpu(int device) {
    return make(device, [](void** at, size_t n) { return cudaMalloc(at, n); }, [](void* at) { return cudaFree(at); });
  }
  // Pinned memory of the host.
  static std::shared_ptr<MemoryPool> of_host(int device) {
    return make(
        device, [](void** at, size_t n) { return cudaMallocHost(at, n); }, [](void* at) { return cudaFreeHost(at); });
  }

  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;
  ~MemoryPool() {
    for (const auto& [bytes, blocks] : blocks_)
      for (void* block : blocks)
        if (free_(block) != cudaSuccess) cudaGetLastError();
  }

  std::shared_ptr<void> take(int64_t num_bytes) {
    int64_t bytes = kLeastBytes;
    while (bytes < num_bytes) bytes *= 2;
    void* block = nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::vector<void*>& blocks = blocks_[bytes];
      if (!blocks.empty()) {
        block = blocks.back();
        blocks.pop_back();
      }
    }
    if (block == nullptr) {
      const OnDevice here(device_);
      HETMPI_CHECK(allocate_(&block, bytes));
    }
    return {block, [pool = shared_from_this(), bytes](void* memory) {
              const std::lock_guard<std::mutex> lock(pool->mutex_);
              pool->blocks_[bytes].push_back(memory);
            }};
  }

 private:
  static constexpr int64_t kLeastBytes = 256;

  MemoryPool(int device, Allocate allocate, Free free) : device_(device), allocate_(allocate), free_(free) {}

  static std::shared_ptr<MemoryPool> make(int device, Allocate allocate, Free free) {
    return std::shared_ptr<MemoryPool>(new MemoryPool(device, allocate, free));
  }

  int device_;
  Allocate allocate_;
  Free free_;
  std::mutex mutex_;
  std::map<int64_t, std::vector<void*>> blocks_;  // that nobody uses
};

}  // namespace hetmpi
