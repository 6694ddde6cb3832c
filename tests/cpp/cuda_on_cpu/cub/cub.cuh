// CUB as far as cpp/cuda/*.cu use it, on the CPU. Scratch memory is filled with garbage when a call runs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "../cuda_runtime.h"

namespace cub {

constexpr size_t kScratchBytes = 64;

// The two phases of a call: see cpp/cuda/device.h, with_scratch.
template <typename Work>
cudaError_t in_phases(void* memory, size_t& bytes, std::vector<const void*> uses, cudaStream_t stream, Work work) {
  bytes = kScratchBytes;
  if (memory == nullptr) return cudaSuccess;
  uses.push_back(memory);
  const auto run = [=] {
    std::memset(memory, 0xcd, kScratchBytes);
    work();
  };
  cuda_on_cpu::enqueue(stream, run, uses);
  return cudaSuccess;
}

struct DeviceScan {
  template <typename T>
  static cudaError_t ExclusiveSum(void* memory, size_t& bytes, const T* in, T* out, int n, cudaStream_t stream) {
    return in_phases(memory, bytes, {in, out}, stream, [=] {
      T sum = 0;
      for (int i = 0; i < n; ++i) {
        const T value = in[i];
        out[i] = sum;
        sum += value;
      }
    });
  }

  template <typename T>
  static cudaError_t InclusiveSum(void* memory, size_t& bytes, const T* in, T* out, int n, cudaStream_t stream) {
    return in_phases(memory, bytes, {in, out}, stream, [=] { std::partial_sum(in, in + n, out); });
  }
};

struct DeviceRadixSort {
  template <typename Key, typename Value>
  static cudaError_t SortPairs(void* memory, size_t& bytes, const Key* keys, Key* sorted, const Value* values,
                               Value* sorted_values, int n, int begin_bit, int end_bit, cudaStream_t stream) {
    const std::vector<const void*> uses{keys, sorted, values, sorted_values};
    return in_phases(memory, bytes, uses, stream, [=] {
      const uint64_t mask = (end_bit == 64 ? 0 : uint64_t{1} << end_bit) - 1;
      const auto bits = [&](int i) { return (static_cast<uint64_t>(keys[i]) & mask) >> begin_bit; };
      std::vector<int> order(n);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return bits(a) < bits(b); });
      for (int i = 0; i < n; ++i) {
        sorted[i] = keys[order[i]];
        sorted_values[i] = values[order[i]];
      }
    });
  }
};

}  // namespace cub
