// Route: the keys of a batch sorted by owner, with the position of each key in the batch. Immutable.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "key_index.h"
#include "owner/partition.h"

namespace hetmpi {

// The arrays of a route: the keys of owner o are keys[first[o]] .. keys[first[o + 1] - 1], in the order of the batch;
// order: their positions there.
struct RouteView {
  const int64_t* order;
  const int64_t* keys;
  const int64_t* first;

  int64_t num(int64_t owner) const { return first[owner + 1] - first[owner]; }
};

class Route {
 public:
  // No keys, of so many ranks.
  explicit Route(int64_t num_ranks) : first_(num_ranks + 1) {}

  // Of keys (n). Throws std::out_of_range for one that is not in the table.
  Route(const Partition& partition, const int64_t* keys, int64_t n)
      : order_(n), keys_(n), first_(partition.size() + 1), num_positions_(n) {
    const auto num_rows = static_cast<uint64_t>(partition.num_rows());
    const int64_t* wrong = std::find_if(keys, keys + n, [=](int64_t key) { return uint64_t(key) >= num_rows; });
    if (wrong != keys + n)
      throw std::out_of_range("keys must lie in [0, " + std::to_string(num_rows) + "), got " + std::to_string(*wrong));
    if (partition.size() == 1) {
      std::iota(order_.begin(), order_.end(), 0);
      std::copy_n(keys, n, keys_.begin());
      first_[1] = n;
      return;
    }
    static thread_local std::vector<int64_t> owners;
    owners.resize(n);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t owner = owners[i] = partition.locate(keys[i]).owner;
      ++first_[owner + 1];
    }
    for (int64_t rank = 0; rank < partition.size(); ++rank) first_[rank + 1] += first_[rank];
    std::vector<int64_t> next(first_.begin(), first_.end() - 1);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = next[owners[i]]++;
      order_[at] = i;
      keys_[at] = keys[i];
    }
  }

  // The part whose keys are chosen (num_positions); positions remain those in the whole batch.
  Route where(const uint8_t* chosen) const {
    Route part(num_ranks());
    part.num_positions_ = num_positions_;
    part.order_.reserve(size());
    part.keys_.reserve(size());
    for (int64_t rank = 0; rank < num_ranks(); ++rank) {
      for (int64_t i = first_[rank]; i < first_[rank + 1]; ++i) {
        if (!chosen[order_[i]]) continue;
        part.order_.push_back(order_[i]);
        part.keys_.push_back(keys_[i]);
      }
      part.first_[rank + 1] = part.size();
    }
    return part;
  }

  // mask (num_positions): whether the owner of a key is among ranks (num_ranks). Of a route of the whole batch.
  void owned_by(const uint8_t* ranks, uint8_t* mask) const {
    for (int64_t rank = 0; rank < num_ranks(); ++rank)
      for (int64_t i = first_[rank]; i < first_[rank + 1]; ++i) mask[order_[i]] = ranks[rank];
  }

  // places (num_positions): of each key among the chosen ones of another batch, keys (n), which are unique; -1 for
  // none. Of a route of the whole batch.
  void find_in(const int64_t* keys, const uint8_t* chosen, int64_t n, int64_t* places) const {
    static thread_local KeyIndex index;
    static thread_local std::vector<int64_t> positions;  // of the chosen keys, in the order of their numbers
    positions.clear();
    for (int64_t i = 0; i < n; ++i)
      if (chosen[i]) positions.push_back(i);
    index.clear(positions.size());
    for (const int64_t i : positions) index.number(keys[i]);
    for (int64_t i = 0; i < size(); ++i) {
      const int32_t number = index.find(keys_[i]);
      places[order_[i]] = number < 0 ? -1 : positions.at(number);
    }
  }

  int64_t size() const { return static_cast<int64_t>(keys_.size()); }
  int64_t num_positions() const { return num_positions_; }
  int64_t num_ranks() const { return static_cast<int64_t>(first_.size()) - 1; }
  int64_t num_elsewhere(int64_t rank) const { return size() - (first_.at(rank + 1) - first_[rank]); }
  RouteView view() const { return {order_.data(), keys_.data(), first_.data()}; }

  const std::vector<int64_t>& order() const { return order_; }
  const std::vector<int64_t>& keys() const { return keys_; }
  const std::vector<int64_t>& first() const { return first_; }

 private:
  std::vector<int64_t> order_, keys_, first_;
  int64_t num_positions_ = 0;
};

}  // namespace hetmpi
