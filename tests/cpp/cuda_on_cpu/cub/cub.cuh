// CUB as far as cpp/cuda/*.cu use it, on the CPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "../cuda_runtime.h"

namespace cub {

struct DeviceScan {
  template <typename T>
  static cudaError_t ExclusiveSum(void* memory, size_t& bytes, const T* in, T* out, int n, cudaStream_t) {
    bytes = 1;
    if (memory == nullptr) return cudaSuccess;
    T sum = 0;
    for (int i = 0; i < n; ++i) {
      const T value = in[i];
      out[i] = sum;
      sum += value;
    }
    return cudaSuccess;
  }

  template <typename T>
  static cudaError_t InclusiveSum(void* memory, size_t& bytes, const T* in, T* out, int n, cudaStream_t) {
    bytes = 1;
    if (memory == nullptr) return cudaSuccess;
    std::partial_sum(in, in + n, out);
    return cudaSuccess;
  }
};

struct DeviceRadixSort {
  template <typename Key, typename Value>
  static cudaError_t SortPairs(void* memory, size_t& bytes, const Key* keys, Key* sorted, const Value* values,
                               Value* sorted_values, int n, int begin_bit, int end_bit, cudaStream_t) {
    bytes = 1;
    if (memory == nullptr) return cudaSuccess;
    const uint64_t mask = (end_bit == 64 ? 0 : uint64_t{1} << end_bit) - 1;
    const auto bits = [&](int i) { return (static_cast<uint64_t>(keys[i]) & mask) >> begin_bit; };
    std::vector<int> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return bits(a) < bits(b); });
    for (int i = 0; i < n; ++i) {
      sorted[i] = keys[order[i]];
      sorted_values[i] = values[order[i]];
    }
    return cudaSuccess;
  }
};

}  // namespace cub
