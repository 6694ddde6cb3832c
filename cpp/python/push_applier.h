// The push applier on numpy arrays, which the caller keeps alive (py::keep_alive in push_applier.cpp).
#pragma once

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "owner/push_applier.h"
#include "owner/ring.h"
#include "owner/row_optimizer.h"
#include "python/arrays.h"
#include "python/bindings.h"
#include "python/owner_arrays.h"
#include "python/wire_arrays.h"

namespace hetmpi {

class PyPushApplier {
 public:
  PyPushApplier(Array<uint8_t> rings, Array<float> weight, Array<float> state, Array<int32_t> clock,
                Array<uint8_t> touched, Array<float> mean_square, const Directory* directory, RowOptimizer optimizer,
                RowFile* file)
      : format_(push_format(optimizer)),
        applier_(consumers(rings.mutable_data(), rings.shape(1), rings.shape(0), format_),
                 with_mean_square(shard_of(weight, state, clock, touched, directory, file), mean_square), optimizer) {}

  void set_step(const std::vector<double>& lrs, int64_t step) {
    py::gil_scoped_release release;
    applier_.set_step(lrs.data(), static_cast<int64_t>(lrs.size()), step);
  }

  int64_t drain() {
    py::gil_scoped_release release;
    return applier_.drain();
  }

  void watch(const std::vector<int64_t>& rings) { applier_.watch(rings); }
  // The rows of a message that `rank`, this one, owns.
  void apply(const PyMessage& message, int64_t rank) {
    const int64_t begin = message.route->first().at(rank), n = message.route->first().at(rank + 1) - begin;
    Message own = message.columns(format_);
    own.keys += begin;
    py::gil_scoped_release release;
    applier_.apply(own, message.route->order().data() + begin, n);
  }

  // Columns of a record.
  void apply_record(const Array<int64_t>& keys, const Array<int32_t>& clocks, const Array<int32_t>& counts,
                    const std::optional<Array<int32_t>>& steps, const Array<float>& grads,
                    const Array<float>& squares) {
    const ssize_t n = keys.shape(0);
    check_shape(grads, "grads", {n, format_.dim()});
    check_shape(clocks, "clocks", {n});
    check_shape(counts, "counts", {n});
    if (steps) check_shape(*steps, "steps", {n, 2});
    const int32_t* count = counts.data();
    check_shape(
        squares, "squares",
        {std::count_if(count, count + n, [this](int32_t c) { return format_.has_squares(c); }), format_.square_dim});
    const RecordColumns columns{keys.data(),  clocks.data(), count, column(steps, "steps", format_.has_steps),
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
  // mean_square (n, 0 or 1).
  static Shard with_mean_square(Shard shard, Array<float>& mean_square) {
    check_shape(mean_square, "mean_square", {shard.num_rows, -1});
    if (mean_square.shape(1) > 0) shard.mean_square = mean_square.mutable_data();
    return shard;
  }

  RecordFormat format_;
  PushApplier applier_;
};

}  // namespace hetmpi
