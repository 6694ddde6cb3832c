// RankSums: the sums of the gradients that several ranks have for the same rows.
//
// Float addition is not associative. The order here depends on the ranks alone: the sum over 2^l ranks from a multiple
// of 2^l on is that of the first half plus that of the second, and ranks without a gradient are left out.
//
// A row has a stack of parts, sums over disjoint blocks of ranks. Two parts are added when no later rank can belong
// between them.
//
// Invariant: the ranks of a row's parts rise from the lowest part to the top, and each part holds all gradients added
// so far of the smallest aligned block around its ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "vectors.h"

namespace hetmpi {

class RankSums {
 public:
  // Forgets all rows. num_ranks: of the run.
  void begin(int64_t dim, int64_t num_ranks) {
    dim_ = dim;
    num_ranks_ = num_ranks;
    tops_.clear();
    parts_.clear();
    sums_.clear();
  }

  // Adds the gradient (dim) of a rank to a row. Rows are numbered as they come: `row` is at most size(). The ranks of a
  // row come in ascending order. is_kept: grad stays valid and unchanged until the next begin().
  void add(int64_t row, int64_t rank, const float* grad, bool is_kept) {
    if (row == size()) {
      tops_.push_back(push(rank, grad, is_kept, kNone));
      return;
    }
    int32_t& top = tops_[row];
    while (parts_[top].below != kNone &&
           level(parts_[parts_[top].below].rank, parts_[top].rank) < level(parts_[top].rank, rank))
      top = merged(top);
    if (ends_block(rank, level(parts_[top].rank, rank)))
      hetmpi::add(writable(top), grad, dim_);
    else
      top = push(rank, grad, is_kept, top);
  }

  int64_t size() const { return static_cast<int64_t>(tops_.size()); }

  // The sum (dim) of a row; no more gradients may be added to it.
  const float* sum(int64_t row) {
    int32_t& top = tops_[row];
    while (parts_[top].below != kNone) top = merged(top);
    return values(top);
  }

 private:
  static constexpr int32_t kNone = -1;

  struct Part {
    const float* kept;  // the caller's gradient, or null: the sum is in sums_
    int64_t place;      // there
    int64_t rank;       // the first one
    int32_t below;      // the next part of the row's stack
  };

  // l, if the two ranks are in different halves of an aligned block of 2^(l + 1).
  static int level(int64_t a, int64_t b) { return 63 - __builtin_clzll(static_cast<uint64_t>(a ^ b)); }

  // Whether no later rank is in the rank's aligned block of 2^level.
  bool ends_block(int64_t rank, int level) const {
    return rank + 1 == num_ranks_ || (rank + 1) % (int64_t{1} << level) == 0;
  }

  int32_t push(int64_t rank, const float* grad, bool is_kept, int32_t below) {
    parts_.push_back({grad, 0, rank, below});
    const auto part = static_cast<int32_t>(parts_.size() - 1);
    if (!is_kept) writable(part);
    return part;
  }

  const float* values(int32_t part) const {
    return parts_[part].kept ? parts_[part].kept : sums_.data() + parts_[part].place * dim_;
  }

  float* writable(int32_t number) {
    Part& part = parts_[number];
    if (part.kept) {
      part.place = static_cast<int64_t>(sums_.size()) / dim_;
      sums_.insert(sums_.end(), part.kept, part.kept + dim_);
      part.kept = nullptr;
    }
    return sums_.data() + part.place * dim_;
  }

  // Adds a part to the one below it, and returns that.
  int32_t merged(int32_t top) {
    const int32_t below = parts_[top].below;
    float* sum = writable(below);
    hetmpi::add(sum, values(top), dim_);
    return below;
  }

  int64_t dim_ = 0, num_ranks_ = 0;
  std::vector<int32_t> tops_;  // of each row's stack
  std::vector<Part> parts_;
  std::vector<float> sums_;  // (parts that are not kept, dim)
};

}  // namespace hetmpi
