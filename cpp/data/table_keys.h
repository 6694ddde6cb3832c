// TableKeys: the distinct keys of one table in a batch.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "key_index.h"

namespace hetmpi {

class TableKeys {
 public:
  using List = std::pair<const int64_t*, int64_t>;  // values, and their number

  // Takes the keys of columns of ids (n, width), row by row, then of lists: `distinct` has them then, in order of first
  // appearance. Their numbers, counted from `first`, go to the same columns of index (n, width), and to numbers().
  void take(KeyIndex* distinct, const int64_t* ids, int64_t n, int64_t width, const std::vector<int64_t>& columns,
            const std::vector<List>& lists, int64_t first, int64_t* index) {
    all_.clear();
    for (int64_t row = 0; row < n; ++row)
      for (const int64_t column : columns) all_.push_back(ids[row * width + column]);
    for (const auto& [values, num] : lists) all_.insert(all_.end(), values, values + num);
    numbers_.resize(all_.size());
    distinct->number_all(all_.data(), static_cast<int64_t>(all_.size()), numbers_.data());
    counts_.assign(distinct->size(), 0);
    for (int64_t& number : numbers_) {
      ++counts_[number];
      number += first;
    }
    const int64_t* number = numbers_.data();
    for (int64_t row = 0; row < n; ++row)
      for (const int64_t column : columns) index[row * width + column] = *number++;
  }

  // Of the last take(): how often each key occurs.
  const std::vector<int64_t>& counts() const { return counts_; }
  const std::vector<int64_t>& numbers() const { return numbers_; }

 private:
  std::vector<int64_t> all_, numbers_, counts_;
};

}  // namespace hetmpi
