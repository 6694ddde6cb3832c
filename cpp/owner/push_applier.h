// PushApplier: the owner's side of a table at staleness s >= 1; ApplierThread: the thread that applies the pushes from
// the rings of all tables of a rank while it computes, if any rank pushes through rings. Neither uses MPI or Python.
//
// The rank's main thread may drain too while it waits, and applies its own sums directly; whoever runs the rank's
// server, the main thread or by windows WindowThread, applies what its clients push. A lock makes them one writer of a
// table; a server takes it while it holds its own.
//
// Invariants:
//   the writer of the shard or of a ring's tail holds lock_;
//   a ring's tail passes a record only after all of it is applied: if an origin sees tail == head, all its pushes have
//   been applied;
//   an error in a record is kept and thrown by every later drain() and apply(), and nothing more is drained: the ring
//   fills up, no push is lost.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "owner/ring.h"
#include "owner/shard.h"

namespace hetmpi {

// Records of pushes under a rule.
inline RecordFormat push_format(const RowOptimizer& rule) {
  return {rule.sum_dim(), true, !rule.is_plain(), rule.sum_dim() - rule.dim()};
}

class PushApplier {
 public:
  // rings: one per origin, of records with clocks. Those of watch() are drained.
  PushApplier(std::vector<RingConsumer> rings, Shard shard, RowOptimizer optimizer)
      : rings_(std::move(rings)),
        shard_(shard),
        optimizer_(optimizer),
        format_(push_format(optimizer)),
        history_(optimizer),
        squares_(format_.square_dim) {}

  const RecordFormat& format() const { return format_; }

  // The rings whose pushes are applied.
  void watch(const std::vector<int64_t>& rings) {
    std::lock_guard<std::mutex> hold(lock_);
    watched_.clear();
    for (const int64_t ring : rings) watched_.push_back(&rings_.at(ring));
  }

  // The rank's step, and the learning rates of n steps from it on: other ranks may be ahead. A push is applied at the
  // rate of its last step, as far as that is known.
  void set_step(const double* lrs, int64_t n, int64_t step) {
    std::lock_guard<std::mutex> hold(lock_);
    if (newest_ == 0 || step > newest_ + 1) oldest_ = step;
    for (int64_t i = 0; i < n; ++i) rates_[(step + i) % kSteps] = optimizer_.rate(lrs[i], step + i);
    now_ = step;
    newest_ = std::max(newest_, step + n - 1);
    oldest_ = std::max(oldest_, newest_ - kSteps + 1);
  }

  // Applies records that have arrived, at most kRecords of each origin. Returns the number of rows applied.
  int64_t drain() {
    std::lock_guard<std::mutex> hold(lock_);
    throw_kept();
    const int64_t applied = drain_rings();
    throw_kept();
    return applied;
  }

  // As drain(), but throws nothing: an error is kept for the next call of another method.
  int64_t drain_apart() {
    std::lock_guard<std::mutex> hold(lock_);
    return drain_rings();
  }

  // Applies the rank's own sums: columns as in a ring, clocks, counts and values at order[i].
  void apply(const PushColumns& own, const int64_t* order, int64_t num_rows) {
    std::lock_guard<std::mutex> hold(lock_);
    throw_kept();
    const int64_t* rows = rows_of(own.keys, num_rows);
    for (int64_t i = 0; i < num_rows; ++i) {
      const int64_t j = order[i];
      if (i + kAhead < num_rows) {
        shard_.prefetch(rows[i + kAhead]);
        prefetch_row(own.values + order[i + kAhead] * format_.width, format_.dim());
      }
      const Steps steps = own.steps ? Steps{own.steps[2 * j], own.steps[2 * j + 1]} : this_step();
      const float* sum = own.values + j * format_.width;
      apply_entry(rows[i], sum, sum + format_.dim(), {own.counts[j], steps}, own.clocks[j]);
    }
  }

  // Applies the columns of a record that another rank sent as a message.
  void apply(const RecordColumns& from, int64_t num_rows) {
    std::lock_guard<std::mutex> hold(lock_);
    throw_kept();
    apply_record(from, num_rows);
  }

  // Rows of which pushes are kept (push_history.h).
  int64_t num_histories() {
    std::lock_guard<std::mutex> hold(lock_);
    return history_.size();
  }

  // Runs `reads` while the shard is not written.
  template <typename Reads>
  void exclusively(Reads reads) {
    std::lock_guard<std::mutex> hold(lock_);
    reads();
  }

 private:
  static constexpr int64_t kSteps = 64;  // whose learning rates are known
  static constexpr int64_t kAhead = 16;  // rows prefetched
  static constexpr int kRecords = 64;    // of one ring per turn: a busy producer must not keep others from the lock

  // REQUIRES: lock_ held.
  int64_t drain_rings() {
    int64_t applied = 0;
    try {
      for (RingConsumer* ring : watched_) applied += error_ ? 0 : drain_ring(*ring);
    } catch (...) {
      error_ = std::current_exception();
    }
    return applied;
  }

  int64_t drain_ring(RingConsumer& ring) {
    int64_t applied = 0;
    Record record;
    for (int left = kRecords; left > 0 && ring.peek(&record); --left, ring.release(record)) {
      const int64_t n = record.header->num_rows;
      apply_record(record.columns, n);
      applied += n;
    }
    return applied;
  }

  void apply_record(const RecordColumns& from, int64_t num_rows) {
    const int64_t* rows = rows_of(from.keys, num_rows);
    const float* squares = from.squares;
    for (int64_t i = 0; i < num_rows; ++i) {
      const int32_t count = from.counts[i];
      if (i + kAhead < num_rows) shard_.prefetch(rows[i + kAhead]);
      const Steps steps = from.steps ? Steps{from.steps[2 * i], from.steps[2 * i + 1]} : this_step();
      apply_entry(rows[i], from.grads + i * format_.dim(), squares, {count, steps}, from.clocks[i]);
      if (format_.has_squares(count)) squares += format_.square_dim;
    }
  }

  // The rows of keys (n), until the next call.
  const int64_t* rows_of(const int64_t* keys, int64_t n) {
    rows_.resize(n);
    shard_.directory->rows_of(keys, n, rows_.data());
    shard_.want(rows_.data(), n);
    return rows_.data();
  }

  // Of pushes without steps, which plain SGD does not need.
  Steps this_step() const { return {static_cast<int32_t>(now_), static_cast<int32_t>(now_)}; }

  // Applies one push to a row: its sum (dim), and squares (square_dim) if it sums several gradients.
  void apply_entry(int64_t row, const float* sum, const float* squares, const Iterations& of, int32_t clock) {
    optimizer_.set_rate(rates_[std::clamp<int64_t>(of.steps.last, oldest_, newest_) % kSteps]);
    if (!format_.has_squares(of.count)) {
      optimizer_.square(squares_.data(), sum, Serially());
      squares = squares_.data();
    }
    shard_.apply_sum(row, optimizer_.summed(sum, squares, of.count), of.steps, clock, optimizer_, history_);
  }

  void throw_kept() const {
    if (error_) std::rethrow_exception(error_);
  }

  std::vector<RingConsumer> rings_;
  std::vector<RingConsumer*> watched_;
  Shard shard_;
  RowOptimizer optimizer_;
  RecordFormat format_;
  PushHistory history_;
  std::vector<int64_t> rows_;                  // of the record being applied
  std::vector<float> squares_;                 // of the single gradient being applied
  RowOptimizer::Rate rates_[kSteps];           // of step i at i modulo kSteps
  int64_t now_ = 0, oldest_ = 0, newest_ = 0;  // the rank's step; the steps whose rates are known
  std::exception_ptr error_;
  std::mutex lock_;  // of all above
};

class ApplierThread {
 public:
  ~ApplierThread() { stop(); }

  // Drains the rings of this applier too, until remove().
  void add(PushApplier* applier) {
    {
      std::lock_guard<std::mutex> hold(lock_);
      appliers_.push_back(applier);
      if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    }
    wake_.notify_all();
  }

  // The applier is not used any more; records remain in its rings. No effect if it was not added.
  void remove(PushApplier* applier) {
    std::lock_guard<std::mutex> hold(lock_);
    appliers_.erase(std::remove(appliers_.begin(), appliers_.end(), applier), appliers_.end());
  }

 private:
  using Microseconds = std::chrono::microseconds;
  static constexpr Microseconds kShortest{20}, kLongest{1000};  // polling interval of empty rings

  void stop() {
    {
      std::lock_guard<std::mutex> hold(lock_);
      stops_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  void run() {
    Microseconds pause = kShortest;
    std::unique_lock<std::mutex> hold(lock_);
    while (!stops_) {
      wake_.wait(hold, [this] { return stops_ || !appliers_.empty(); });
      int64_t num_applied = 0;
      for (PushApplier* applier : appliers_) num_applied += applier->drain_apart();
      pause = num_applied > 0 ? kShortest : std::min(2 * pause, kLongest);
      wake_.wait_for(hold, pause, [this] { return stops_; });
    }
  }

  std::vector<PushApplier*> appliers_;
  bool stops_ = false;
  std::mutex lock_;  // of these
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace hetmpi
