// The owners' side of a table's messages on numpy arrays, which the caller keeps alive (py::keep_alive in round.cpp).
#pragma once

#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "python/arrays.h"
#include "python/bindings.h"
#include "python/push_applier.h"
#include "python/wire_arrays.h"
#include "wire/round.h"

namespace hetmpi {

struct ShardArrays {
  Array<int32_t> clock;
  std::vector<Array<float>> arrays;  // of a row
  const Directory* directory;
  const RowFile* file;  // has the first of the arrays, which has no rows then; or null
};

class PyRoundServer {
 public:
  PyRoundServer(PyPushApplier* applier, size_t own, const std::vector<ShardArrays>& shards,
                const std::vector<RoundServer::Rings>& rings, RecordFormat format,
                const std::vector<Array<int64_t>>& applied)
      : core_(applier ? &applier->core() : nullptr, own, views(shards), rings, format, dims_of(shards.at(own)),
              numbers(applied)) {}

  bool has_applied(int64_t step) const { return core_.has_applied(step); }
  RoundServer& core() { return core_; }

 private:
  static std::vector<int64_t> dims_of(const ShardArrays& shard) {
    std::vector<int64_t> dims;
    for (const auto& array : shard.arrays) dims.push_back(array.shape(1));
    return dims;
  }

  static std::vector<const int64_t*> numbers(const std::vector<Array<int64_t>>& arrays) {
    std::vector<const int64_t*> found;
    for (const auto& array : arrays) found.push_back(array.data());
    return found;
  }

  static std::vector<NodeShard> views(const std::vector<ShardArrays>& shards) {
    std::vector<NodeShard> found;
    for (const ShardArrays& shard : shards) {
      std::vector<const float*> arrays;
      for (const auto& array : shard.arrays) {
        const bool is_in_file = shard.file != nullptr && arrays.empty();
        check_shape(array, "array", {is_in_file ? 0 : shard.clock.shape(0), -1});
        arrays.push_back(array.data());
      }
      found.push_back({shard.clock.data(), arrays, shard.directory, shard.file});
    }
    return found;
  }

  RoundServer core_;
};

}  // namespace hetmpi
