// Shards and columns of the core that refer to numpy arrays, valid as long as the arrays live.
#pragma once

#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "owner/ring.h"
#include "owner/shard.h"
#include "python/arrays.h"

namespace hetmpi {

// file: has the rows, weight and state have none then.
inline Shard shard_of(Array<float>& weight, Array<float>& state, Array<int32_t>& clock, Array<uint8_t>& touched,
                      const Directory* directory, RowFile* file) {
  const ssize_t n = clock.shape(0);
  check_shape(weight, "weight", {file ? 0 : n, -1});
  check_shape(state, "state", {file ? 0 : n, -1});
  check_shape(touched, "touched", {n});
  const ssize_t dim = weight.shape(1), state_dim = state.shape(1);
  return {weight.mutable_data(),
          state.mutable_data(),
          clock.mutable_data(),
          touched.mutable_data(),
          n,
          dim,
          state_dim,
          nullptr,
          directory,
          file};
}

// An array of shape (n, ...), or null for None.
template <typename T>
const T* column(const std::optional<Array<T>>& array, const char* name, bool is_wanted) {
  if (is_wanted != array.has_value())
    throw std::invalid_argument(std::string(name) + (is_wanted ? " are missing" : " have no place in these records"));
  return array ? array->data() : nullptr;
}

}  // namespace hetmpi
