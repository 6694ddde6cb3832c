// Shards and messages of the core that refer to numpy arrays, valid as long as the arrays live.
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

// The columns of a message, checked.
inline Message message_of(const Array<int64_t>& keys, const Array<float>& values, const Array<int64_t>& order,
                          const std::optional<Array<int32_t>>& clocks, const std::optional<Array<int32_t>>& counts,
                          const std::optional<Array<int32_t>>& steps, RecordFormat format) {
  check_shape(order, "order", {keys.shape(0)});
  check_shape(values, "values", {-1, format.width});
  if (clocks) check_shape(*clocks, "clocks", {values.shape(0)});
  if (counts) check_shape(*counts, "counts", {values.shape(0)});
  if (steps) check_shape(*steps, "steps", {values.shape(0), 2});
  return {keys.data(), column(clocks, "clocks", format.has_clocks), column(counts, "counts", format.has_clocks),
          column(steps, "steps", format.has_steps), values.data()};
}

}  // namespace hetmpi
