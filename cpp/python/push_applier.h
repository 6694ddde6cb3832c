// The push applier of a shard, which the caller keeps alive (py::keep_alive in push_applier.cpp).
#pragma once

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "owner/push_applier.h"
#include "owner/ring.h"
#include "owner/row_optimizer.h"
#include "python/arrays.h"
#include "python/bindings.h"
#include "python/shard_arrays.h"

namespace hetmpi {

class PyPushApplier {
 public:
  PyPushApplier(ShardArrays& shard, const RowOptimizer& rule)
      : format_(push_format(rule)), applier_(shard.ends(format_), shard.core(), rule) {}

  void set_step(const std::vector<double>& lrs, int64_t step) {
    py::gil_scoped_release release;
    applier_.set_step(lrs.data(), static_cast<int64_t>(lrs.size()), step);
  }

  int64_t drain() {
    py::gil_scoped_release release;
    return applier_.drain();
  }

  void watch(const std::vector<int64_t>& rings) { applier_.watch(rings); }

  // Columns of a record.
  void apply_record(const Array<int64_t>& keys, const Array<int32_t>& clocks, const Array<int32_t>& counts,
                    const std::optional<Array<int32_t>>& steps, const Array<float>& grads,
                    const Array<float>& squares) {
    const ssize_t n = keys.shape(0);
    check_shape(grads, "grads", {n, format_.dim()});
    check_shape(clocks, "clocks", {n});
    check_shape(counts, "counts", {n});
    if (steps.has_value() != format_.has_steps) throw std::invalid_argument("steps are missing, or have no place");
    if (steps) check_shape(*steps, "steps", {n, 2});
    const int32_t* count = counts.data();
    check_shape(
        squares, "squares",
        {std::count_if(count, count + n, [this](int32_t c) { return format_.has_squares(c); }), format_.square_dim});
    const RecordColumns columns{keys.data(),  clocks.data(), count, steps ? steps->data() : nullptr,
                                grads.data(), squares.data()};
    py::gil_scoped_release release;
    applier_.apply(columns, n);
  }

  int64_t num_histories() {
    py::gil_scoped_release release;
    return applier_.num_histories();
  }

  PushApplier& core() { return applier_; }

 private:
  RecordFormat format_;
  PushApplier applier_;
};

}  // namespace hetmpi
