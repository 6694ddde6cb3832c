// Inbox: the owner's side of one synchronous step (s = 0).
//
// Every origin sends the gradients of its step through its ring; this rank's own are passed as arrays. The inbox sums
// them per row in rank order, whatever order they arrive in, and applies the row optimizer once to each sum. Float
// addition is not associative: the fixed order makes two runs bitwise equal.
//
// Rank order cannot deadlock: ring 0 is always drained, so rank 0 always finishes sending, then ring 1, and so on.
//
// Invariants:
//   next_ is the lowest origin whose "last" record of this step has not arrived;
//   sums_[i] is the sum over origins < next_ (and the drained part of next_) of the gradients of row index_.keys()[i].
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "key_index.h"
#include "owner/ring.h"
#include "owner/shard.h"
#include "vectors.h"

namespace hetmpi {

class Inbox {
 public:
  // rings: one per origin, in rank order, of records without clocks; this rank's own ring is not used.
  Inbox(std::vector<RingConsumer> rings, int64_t own_rank, Shard shard)
      : rings_(std::move(rings)), own_rank_(own_rank), shard_(shard) {}

  // Begins a step with this rank's own message, rows (n) and grads (n, dim). The arrays must outlive poll().
  void begin(int64_t step, const int64_t* rows, const float* grads, int64_t num_rows) {
    step_ = step;
    next_ = 0;
    own_ = {rows, grads, num_rows};
    index_.clear(num_rows * 2);
    sums_.clear();
  }

  // Sums the records that have arrived; true once all origins have sent "last". Never blocks.
  bool poll() {
    while (next_ < static_cast<int64_t>(rings_.size())) {
      if (next_ == own_rank_) {
        for (int64_t i = 0; i < own_.num_rows; ++i) add(own_.rows[i], own_.grads + i * shard_.dim);
        ++next_;
        continue;
      }
      Record record;
      if (!rings_[next_].peek(&record)) return false;
      check(record);
      for (int64_t i = 0; i < record.header->num_rows; ++i)
        add(record.columns.rows[i], record.columns.grads + i * shard_.dim);
      const bool is_last = record.header->is_last;
      rings_[next_].release(record);
      if (is_last) ++next_;
    }
    return true;
  }

  // The lowest origin that has not sent all of its step.
  int64_t awaited() const { return next_; }

  // Applies the optimizer once per summed row. REQUIRES: poll() returned true. Returns the number of updated rows.
  int64_t apply(const RowOptimizer& optimizer) {
    for (int64_t i = 0; i < index_.size(); ++i)
      shard_.apply(index_.keys()[i], sums_.data() + i * shard_.dim, optimizer);
    return index_.size();
  }

 private:
  struct Own {
    const int64_t* rows;
    const float* grads;
    int64_t num_rows;
  };

  void add(int64_t row, const float* grad) {
    shard_.check(row);
    const int64_t dim = shard_.dim;
    const int64_t i = index_.number(row);
    if ((i + 1) * dim > static_cast<int64_t>(sums_.size())) {
      sums_.insert(sums_.end(), grad, grad + dim);
      return;
    }
    hetmpi::add(sums_.data() + i * dim, grad, dim);
  }

  void check(const Record& record) const {
    if (record.header->step != step_)
      throw std::logic_error("inbox: rank " + std::to_string(next_) + " sent step " +
                             std::to_string(record.header->step) + " while step " + std::to_string(step_) + " is open");
  }

  std::vector<RingConsumer> rings_;
  int64_t own_rank_;
  Shard shard_;
  int64_t step_ = -1;
  int64_t next_ = 0;
  Own own_{};
  KeyIndex index_;
  std::vector<float> sums_;  // (distinct rows, dim)
};

}  // namespace hetmpi
