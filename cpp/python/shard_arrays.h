// A shard in numpy arrays, as its owner and the other ranks of its node use it.
#pragma once

#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "owner/node_rows.h"
#include "owner/ring.h"
#include "owner/shard.h"
#include "python/arrays.h"
#include "python/bindings.h"

namespace hetmpi {

class ShardArrays {
 public:
  // touched: of the owner; file: has the rows, weight and state have none then.
  ShardArrays(Array<float> weight, Array<float> state, Array<float> mean_square, Array<int32_t> clock,
              Array<int64_t> applied, Array<uint8_t> rings, const Directory* directory, RowFile* file,
              std::optional<Array<uint8_t>> touched)
      : weight_(std::move(weight)),
        state_(std::move(state)),
        mean_square_(std::move(mean_square)),
        clock_(std::move(clock)),
        applied_(std::move(applied)),
        rings_(std::move(rings)),
        touched_(std::move(touched)),
        directory_(directory),
        file_(file) {
    const ssize_t n = clock_.shape(0);
    check_shape(weight_, "weight", {file ? 0 : n, -1});
    check_shape(state_, "state", {file ? 0 : n, -1});
    check_shape(mean_square_, "mean_square", {n, -1});
    check_shape(applied_, "applied", {-1});
    if (touched_) check_shape(*touched_, "touched", {n});
  }

  const Array<float>& weight() const { return weight_; }
  ssize_t dim() const { return weight_.shape(1); }
  int64_t* applied() { return applied_.mutable_data(); }

  Shard core() {
    if (!touched_) throw std::invalid_argument("touched is missing");
    float* const mean_square = mean_square_.shape(1) > 0 ? mean_square_.mutable_data() : nullptr;
    return {weight_.mutable_data(),
            state_.mutable_data(),
            clock_.mutable_data(),
            touched_->mutable_data(),
            clock_.shape(0),
            dim(),
            state_.shape(1),
            mean_square,
            directory_,
            file_};
  }

  // has_states: whether the mean squares are read too.
  NodeShard view(bool has_states) const {
    std::vector<const float*> arrays{weight_.data()};
    if (has_states) arrays.push_back(mean_square_.data());
    return {clock_.data(), std::move(arrays), directory_, file_};
  }

  std::vector<RingConsumer> ends(RecordFormat format) {
    return consumers(rings_.mutable_data(), rings_.shape(1), rings_.shape(0), format);
  }

 private:
  Array<float> weight_, state_, mean_square_;
  Array<int32_t> clock_;
  Array<int64_t> applied_;
  Array<uint8_t> rings_;
  std::optional<Array<uint8_t>> touched_;
  const Directory* directory_;
  RowFile* file_;
};

}  // namespace hetmpi
