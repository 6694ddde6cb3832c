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
//   gradient(i) is the sum over origins < next_ (and the drained part of next_) of the gradients of row
//   index_.keys()[i]. It lies in the caller's array while it is this rank's own alone, otherwise in sums_.
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

  // Begins a step with this rank's own message: row rows[i] (n, distinct) has gradient grads[order[i]] (dim). The
  // arrays must outlive apply().
  void begin(int64_t step, const int64_t* rows, const int64_t* order, const float* grads, int64_t num_rows) {
    step_ = step;
    next_ = 0;
    own_ = {rows, order, grads, num_rows};
    sums_.clear();
    places_.clear();
    if (!is_alone()) index_.clear(num_rows * 2);
  }

  // Sums the records that have arrived; true once all origins have sent "last". Never blocks.
  bool poll() {
    while (next_ < static_cast<int64_t>(rings_.size())) {
      if (next_ == own_rank_) {
        if (!is_alone()) add_own();
        ++next_;
        continue;
      }
      Record record;
      if (!rings_[next_].peek(&record)) return false;
      check(record);
      add(record.columns.rows, record.columns.grads, record.header->num_rows);
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
    const int64_t n = is_alone() ? own_.num_rows : index_.size();
    const int64_t* rows = is_alone() ? own_.rows : index_.keys().data();
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) shard_.prefetch(rows[i + kAhead]);
      if (is_alone()) shard_.check(rows[i]);
      shard_.apply(rows[i], gradient(i), optimizer);
    }
    return n;
  }

 private:
  static constexpr int64_t kAhead = 16;  // rows prefetched

  struct Own {
    const int64_t *rows, *order;
    const float* grads;
    int64_t num_rows;
  };

  // Without other ranks there is nothing to sum: own_ is applied as it is.
  bool is_alone() const { return rings_.size() == 1; }

  // The i-th row's gradient, summed over all ranks.
  const float* gradient(int64_t i) const {
    const int64_t place = is_alone() ? own_.order[i] : places_[i];
    return place >= 0 ? own_.grads + place * shard_.dim : sums_.data() + ~place * shard_.dim;
  }

  void add_own() {
    index_.number_each(own_.rows, own_.num_rows, [this](int64_t i, int32_t number) {
      shard_.check(own_.rows[i]);
      if (is_new(number))
        places_.push_back(own_.order[i]);
      else
        hetmpi::add(sum(number), own_.grads + own_.order[i] * shard_.dim, shard_.dim);
      return true;
    });
  }

  // rows (n), grads (n, dim), of another rank.
  void add(const int64_t* rows, const float* grads, int64_t n) {
    index_.number_each(rows, n, [this, rows, grads](int64_t i, int32_t number) {
      shard_.check(rows[i]);
      if (is_new(number))
        places_.push_back(keep(grads + i * shard_.dim));
      else
        hetmpi::add(sum(number), grads + i * shard_.dim, shard_.dim);
      return true;
    });
  }

  bool is_new(int32_t number) const { return number == static_cast<int64_t>(places_.size()); }

  // The i-th row's gradient, where it may be written.
  float* sum(int64_t i) {
    if (places_[i] >= 0) places_[i] = keep(own_.grads + places_[i] * shard_.dim);
    return sums_.data() + ~places_[i] * shard_.dim;
  }

  // Copies a gradient to the end of sums_, and returns the complement of its number there.
  int64_t keep(const float* grad) {
    sums_.insert(sums_.end(), grad, grad + shard_.dim);
    return ~(static_cast<int64_t>(sums_.size()) / shard_.dim - 1);
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
  std::vector<int64_t> places_;  // of the gradient of each distinct row: in own_.grads, or, complemented, in sums_
  std::vector<float> sums_;      // (rows that other ranks sent, dim)
};

}  // namespace hetmpi
