// ReleasedSums: gradient sums that lines have released, to be sent to the owners. Entry i belongs to keys[i].
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "owner/push_history.h"

namespace hetmpi {

// Leaves elements that a vector adds undefined.
template <typename T>
struct Undefined : std::allocator<T> {
  template <typename U>
  struct rebind {
    using other = Undefined<U>;
  };
  template <typename U>
  void construct(U* at) {
    ::new (static_cast<void*>(at)) U;
  }
  template <typename U, typename... Values>
  void construct(U* at, Values&&... values) {
    ::new (static_cast<void*>(at)) U(std::forward<Values>(values)...);
  }
};

struct ReleasedSums {
  std::vector<int64_t> keys;                  // (n)
  std::vector<int32_t> clocks;                // (n) c_c of the line; without one c_g + 1, or kUnknownClock
  std::vector<int32_t> counts;                // (n) iterations summed
  std::vector<Steps> steps;                   // (n) of these iterations
  std::vector<float, Undefined<float>> sums;  // (n, sum_dim), as in owner/row_optimizer.h

  // Appends one entry and returns the address for its sums.
  float* append(int64_t key, int32_t clock, const Iterations& of, int64_t sum_dim) {
    keys.push_back(key);
    clocks.push_back(clock);
    counts.push_back(of.count);
    steps.push_back(of.steps);
    sums.resize(sums.size() + sum_dim);
    return sums.data() + sums.size() - sum_dim;
  }
};

}  // namespace hetmpi
