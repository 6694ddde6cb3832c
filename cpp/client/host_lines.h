// HostLines: lines in host memory, where the model reads and writes rows too.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "cache/row_cache.h"
#include "client/lines.h"

namespace hetmpi {

class HostLines : public Lines {
 public:
  HostLines(int64_t capacity_rows, const RowOptimizer& rule, Policy policy, RowType type)
      : Lines({Shape(capacity_rows).capacity_rows(), rule.dim(), rule.preview_dim(), rule.sum_dim(), false}),
        cache_(capacity_rows, rule, policy, type),
        populating_([this] { cache_.populate(stops_); }) {}

  ~HostLines() override {
    stops_ = true;
    populating_.join();
  }

  RowCache& cache() { return cache_; }
  ReleasedSums& released() { return released_; }
  const LagHistogram& lags() const { return lags_; }

  void set_step(double lr, int64_t step) override { cache_.set_step(lr, step); }

  Found ask(const Buffer<int64_t>& keys, const Buffer<int64_t>& slots, const Buffer<int32_t>& known, bool will_write,
            int64_t bound) override {
    cache_.look_up(keys.data(), keys.size(), slots.data());
    if (known.size() > 0) cache_.clocks_within(slots.data(), slots.size(), will_write, bound, known.data());
    return num_lines(slots);
  }

  int64_t judge(const Buffer<int64_t>&, const Buffer<int64_t>& slots, const uint8_t* is_fetched,
                const Buffer<int32_t>& clocks, int64_t num_keys, int64_t bound,
                const Buffer<uint8_t>& is_stale) override {
    cache_.use(slots.data(), slots.size(), num_keys);
    judged_.assign(slots.begin(), slots.end());
    for (int64_t i = 0; is_fetched != nullptr && i < slots.size(); ++i)
      if (is_fetched[i]) judged_[i] = -1;
    return cache_.validate(judged_.data(), clocks.data(), slots.size(), bound, is_stale.data(), &lags_);
  }

  void accept(const Buffer<int64_t>& slots, const Buffer<uint8_t>& chosen, const Buffer<float>& weights,
              const Buffer<float>& states, const Buffer<int32_t>& clocks, float anticipate) override {
    cache_.refresh(slots.data(), chosen.data(), weights.data(), states.data(), clocks.data(), slots.size(), anticipate);
  }

  // In the memory of `weights`.
  ModelRows rows(const Buffer<int64_t>& slots, const Buffer<float>& weights, int64_t n) override {
    cache_.gather(slots.data(), slots.size(), weights.data());
    return moved(weights, n);
  }

  ModelRows moved(const Buffer<float>& weights, int64_t n) override { return {weights.data(), n, weights.memory()}; }

  int64_t insert(const Buffer<int64_t>& keys, const Buffer<uint8_t>& chosen, const ModelRows& weights,
                 const Buffer<float>& states, const Buffer<int32_t>& clocks, const Buffer<int64_t>& slots) override {
    const int64_t num = num_missing(slots, chosen);
    if (num > 0)
      num_evicted_ += cache_.insert_and_evict(keys.data(), chosen.data(), weights.at, states.data(), clocks.data(),
                                              slots.size(), slots.data(), &released_);
    return num;
  }

  void update(const Buffer<int64_t>& keys, const Buffer<int64_t>& slots, const Buffer<int32_t>& clocks,
              const ModelRows& grads, int64_t num_without, float anticipate) override {
    cache_.update(slots.data(), grads.at, slots.size(), anticipate);
    if (num_without == 0) return;
    cache_.release_directly(keys.data(), slots.data(), clocks.data(), grads.at, slots.size(), &released_);
  }

  void due(const Buffer<int64_t>& slots, int64_t bound, bool) override {
    cache_.release_due(slots.data(), slots.size(), bound, &released_);
  }
  void due_all() override { cache_.release_all(&released_); }
  int64_t num_evicted() override { return std::exchange(num_evicted_, 0); }
  int64_t num_released(bool) override { return static_cast<int64_t>(released_.keys.size()); }

  std::shared_ptr<ReleasedSums> take(bool) override {
    const auto taken = std::make_shared<ReleasedSums>(std::move(released_));
    released_ = ReleasedSums();
    // The next ones may be as many: growing would copy them.
    released_.sums.reserve(taken->sums.size() + taken->sums.size() / 4);
    return taken;
  }

 private:
  RowCache cache_;
  ReleasedSums released_;
  LagHistogram lags_;
  int64_t num_evicted_ = 0;
  std::vector<int64_t> judged_;  // slots
  std::atomic<bool> stops_{false};
  std::thread populating_;
};

}  // namespace hetmpi
