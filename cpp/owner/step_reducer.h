// StepReducer: the owner's side of one synchronous step (s = 0).
//
// Every rank sends the gradients of its step through its ring; this rank's own are passed as arrays. The reducer sums
// them per row in an order that depends on ranks alone (rank_sums.h), whatever order they arrive in, and applies the
// row optimizer once to each sum: two runs are bitwise equal.
//
// Rank order cannot deadlock: ring 0 is always drained, so rank 0 always finishes sending, then ring 1, and so on.
//
// Invariants:
//   next_ is the lowest rank whose "last" record of this step has not arrived;
//   sums_ has the gradients of ranks < next_ (and the drained part of next_) of key index_.keys()[i] as its i-th row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "key_index.h"
#include "owner/rank_sums.h"
#include "owner/ring.h"
#include "owner/route.h"
#include "owner/shard.h"

namespace hetmpi {

class StepReducer {
 public:
  // rings: one per rank, of records without clocks; this rank's own is not used. applied: counts the steps applied.
  StepReducer(std::vector<RingConsumer> rings, int64_t own_rank, Shard shard, int64_t* applied)
      : rings_(std::move(rings)), own_rank_(own_rank), shard_(shard), applied_(applied) {}

  // Begins a step with this rank's gradients (n, dim) of a route's keys, of which it takes its own. The route must
  // outlive apply(), and the gradients too, unless it `copies` them.
  void begin(int64_t step, const RouteView& route, const float* grads, bool copies) {
    const int64_t begin = route.first[own_rank_];
    own_ = {route.keys + begin, route.order + begin, grads, route.num(own_rank_)};
    step_ = step;
    next_ = 0;
    is_open_ = true;
    if (copies) {
      copied_.resize(own_.num_rows * shard_.dim);
      for (int64_t i = 0; i < own_.num_rows; ++i)
        std::copy_n(own_gradient(i), shard_.dim, copied_.data() + i * shard_.dim);
      own_.order = nullptr;
      own_.grads = copied_.data();
    }
    sums_.begin(shard_.dim, num_ranks());
    if (!is_alone()) index_.clear(own_.num_rows * 2);
  }

  // Whether a step is begun and not applied.
  bool is_open() const { return is_open_; }

  // Sums the records that have arrived; true once all ranks have sent "last". Never blocks.
  bool poll() {
    while (next_ < num_ranks()) {
      if (next_ == own_rank_) {
        if (!is_alone()) add(own_.keys, own_.num_rows, true, [this](int64_t i) { return own_gradient(i); });
        ++next_;
        continue;
      }
      Record record;
      if (!rings_[next_].peek(&record)) return false;
      check(record);
      const float* grads = record.columns.grads;
      add(record.columns.keys, record.header->num_rows, false, [&](int64_t i) { return grads + i * shard_.dim; });
      const bool is_last = record.header->is_last;
      rings_[next_].release(record);
      if (is_last) ++next_;
    }
    return true;
  }

  // The lowest rank that has not sent all of its step; the number of ranks if all have.
  int64_t awaited() const { return next_; }

  // Applies the optimizer once per summed row. REQUIRES: poll() returned true. Returns the number of updated rows.
  int64_t apply(const RowOptimizer& optimizer) {
    const int64_t n = is_alone() ? own_.num_rows : index_.size();
    rows_.resize(n);
    shard_.directory->rows_of(is_alone() ? own_.keys : index_.keys().data(), n, rows_.data());
    shard_.want(rows_.data(), n);
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) shard_.prefetch(rows_[i + kAhead]);
      shard_.apply(rows_[i], is_alone() ? own_gradient(i) : sums_.sum(i), optimizer);
    }
    is_open_ = false;
    __atomic_store_n(applied_, *applied_ + 1, __ATOMIC_RELEASE);  // the rows before it
    return n;
  }

 private:
  static constexpr int64_t kAhead = 16;  // rows prefetched

  struct Own {
    const int64_t *keys, *order;  // order null: 0, 1, ...
    const float* grads;
    int64_t num_rows;
  };

  int64_t num_ranks() const { return static_cast<int64_t>(rings_.size()); }

  // Without other ranks there is nothing to sum: own_ is applied as it is.
  bool is_alone() const { return num_ranks() == 1; }

  const float* own_gradient(int64_t i) const {
    return own_.grads + (own_.order == nullptr ? i : own_.order[i]) * shard_.dim;
  }

  // Adds the next rank's gradients, grad_of(i) (dim) of keys[i] (n). is_kept: as RankSums::add.
  template <typename GradOf>
  void add(const int64_t* keys, int64_t n, bool is_kept, GradOf grad_of) {
    index_.number_each(keys, n, [&](int64_t i, int32_t number) {
      sums_.add(number, next_, grad_of(i), is_kept);
      return true;
    });
  }

  void check(const Record& record) const {
    if (record.header->step != step_)
      throw std::logic_error("step reducer: rank " + std::to_string(next_) + " sent step " +
                             std::to_string(record.header->step) + " while step " + std::to_string(step_) + " is open");
  }

  std::vector<RingConsumer> rings_;
  int64_t own_rank_;
  Shard shard_;
  int64_t* applied_;
  bool is_open_ = false;
  int64_t step_ = -1;
  int64_t next_ = 0;
  Own own_{};
  KeyIndex index_;
  RankSums sums_;
  std::vector<int64_t> rows_;  // of the summed keys
  std::vector<float> copied_;  // this rank's own
};

}  // namespace hetmpi
