// PushHistory: merges the pushes of several ranks over the same steps into one update of a row.
//
// At s = 0 an owner adds the ranks' gradients of a step and applies the rule once. At s >= 1 each rank pushes sums over
// several steps, at times of its own. The owner keeps the last pushes of a row (RecentPushes), so that the next one has
// the meaning it has at s = 0:
//   squares      (a + b)^2 is a^2 + b^2 + 2ab: the products of pushes over the same steps are added. They are estimated
//                as if the gradients of a push were equal, and spread evenly over its steps;
//   iterations   a step in which several ranks touched the row counts once, for weight decay, Adam's averages and the
//                decay of momentum;
//   movement     what the earlier pushes moved the row in these steps is made anew at the new state.
// For pushes of one step all three are exact, up to rounding. Pushes that share no step are separate updates, so a rank
// alone, or ranks that touch a row at different times, need none. They may be dropped at any time: later pushes
// then count as separate.
//
// Invariants:
//   sums and moved are those of the parts of RecentPushes; each part overlaps with the newest one, or was pushed
//   after it;
//   RecentPushes are kept for as many steps as they cover, and kGrace more.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "key_index.h"
#include "owner/row_optimizer.h"

namespace hetmpi {

// The first and the last of several steps, counted from 1.
struct Steps {
  int32_t first, last;
};

// The iterations of a push: their number, and their steps.
struct Iterations {
  int32_t count;
  Steps steps;
};

class PushHistory {
 public:
  explicit PushHistory(const RowOptimizer& rule) : dim_(rule.dim()), width_(rule.overlap_dim()) { index_.clear(0); }

  // Memory of a row with recent pushes, at most: the index has up to four slots per key.
  static int64_t row_bytes(const RowOptimizer& rule) {
    return sizeof(RecentPushes) + sizeof(float) * rule.overlap_dim() + sizeof(int64_t) + 4 * sizeof(int32_t);
  }

  // Rows with recent pushes.
  int64_t size() const { return index_.size(); }

  // Applies a push over these steps to a row; weight (dim), state (state_dim).
  void apply(int64_t row, float* weight, float* state, const Gradient& push, const Steps& steps,
             const RowOptimizer& rule) {
    const auto [first, last] = steps;
    newest_ = std::max(newest_, last);
    if (index_.size() >= limit_ && !index_.contains(row)) sweep();
    const int32_t at = index_.number(row);
    if (at == static_cast<int32_t>(recent_.size())) {
      recent_.push_back({});
      values_.resize(values_.size() + width_, 0.0f);
    }
    RecentPushes& recent = recent_[at];
    float* values = values_.data() + at * width_;
    if (last > recent.last()) keep(recent, first, values);
    const Shared shared = shared_by(recent, steps);
    const bool is_older = recent.num > 0 && last < recent.parts[0].first && shared.steps == 0;
    if (is_older) {
      spare_.assign(width_, 0.0f);
      values = spare_.data();
    }
    const float count = push.count, length = last - first + 1;
    rule.merge(weight, state, push,
               {count * (1 - shared.covered / length), 2 / length, shared.share, std::max(1.0f, shared.steps), values,
                values + dim_});
    if (!is_older) recent.add({first, last, count, count});
  }

 private:
  static constexpr int32_t kGrace = 4;
  static constexpr int64_t kLeast = 1024;  // rows before the first sweep

  // A push, or several over the same steps.
  struct Part {
    int32_t first, last;
    float mass;   // gradients
    float count;  // iterations, at most the steps

    float density() const { return count / (last - first + 1); }
  };

  // Parts in the order of their last steps.
  struct RecentPushes {
    static constexpr int kParts = 8;
    int num = 0;
    Part parts[kParts];

    int32_t first() const {
      int32_t first = INT32_MAX;
      for (int i = 0; i < num; ++i) first = std::min(first, parts[i].first);
      return first;
    }
    int32_t last() const { return num == 0 ? 0 : parts[num - 1].last; }

    void add(const Part& part) {
      for (int i = 0; i < num; ++i) {
        if (parts[i].first != part.first || parts[i].last != part.last) continue;
        const float other = part.density();
        parts[i].mass += part.mass;
        parts[i].count += part.count - parts[i].density() * other * (part.last - part.first + 1);
        return;
      }
      if (num == kParts) {  // the two oldest become one
        Part& oldest = parts[0];
        const Part next = parts[1];
        oldest = {std::min(oldest.first, next.first), next.last, oldest.mass + next.mass, oldest.count + next.count};
        oldest.count = std::min(oldest.count, static_cast<float>(oldest.last - oldest.first + 1));
        std::copy(parts + 2, parts + num, parts + 1);
        --num;
      }
      int place = num++;
      for (; place > 0 && parts[place - 1].last > part.last; --place) parts[place] = parts[place - 1];
      parts[place] = part;
    }
  };

  // What a push shares with the recent ones.
  struct Shared {
    float share = 0;    // of the gradients of recent pushes, those in steps of the push
    float steps = 0;    // of the push, at most, that one part covers
    float covered = 0;  // steps of the push in which other ranks touched the row, as expected
  };

  // Drops the parts that end before step `first`, with their share of the values.
  void keep(RecentPushes& recent, int32_t first, float* values) const {
    int num_old = 0;
    float kept = 0, all = 0;
    for (int i = 0; i < recent.num; ++i) {
      all += recent.parts[i].mass;
      if (recent.parts[i].last < first)
        ++num_old;
      else
        kept += recent.parts[i].mass;
    }
    if (num_old == 0) return;
    std::copy(recent.parts + num_old, recent.parts + recent.num, recent.parts);
    recent.num -= num_old;
    for (int64_t d = 0; d < width_; ++d) values[d] = recent.num == 0 ? 0 : values[d] * (kept / all);
  }

  static Shared shared_by(const RecentPushes& recent, const Steps& of) {
    Shared shared;
    float all = 0, overlapping = 0;
    int32_t ends[2 * RecentPushes::kParts + 2];  // of the intervals that a part covers or does not
    int num_ends = 0;
    for (int i = 0; i < recent.num; ++i) {
      const Part& part = recent.parts[i];
      all += part.mass;
      const int32_t begin = std::max(of.first, part.first), end = std::min(of.last, part.last) + 1;
      if (begin >= end) continue;
      const float steps = end - begin;
      shared.steps = std::max(shared.steps, steps);
      overlapping += part.mass * steps / (part.last - part.first + 1);
      ends[num_ends++] = begin;
      ends[num_ends++] = end;
    }
    if (num_ends == 0) return shared;
    shared.share = overlapping / all;
    std::sort(ends, ends + num_ends);
    for (int k = 0; k + 1 < num_ends; ++k) {
      if (ends[k] == ends[k + 1]) continue;
      float untouched = 1;
      for (int i = 0; i < recent.num; ++i)
        if (recent.parts[i].first <= ends[k] && ends[k] <= recent.parts[i].last)
          untouched *= 1 - recent.parts[i].density();
      shared.covered += (ends[k + 1] - ends[k]) * (1 - untouched);
    }
    return shared;
  }

  // Drops the pushes of rows with which no push is likely to share a step.
  void sweep() {
    KeyIndex kept;
    kept.clear(index_.size() / 2);
    int64_t n = 0;
    for (int64_t at = 0; at < index_.size(); ++at) {
      const RecentPushes recent = recent_[at];
      if (newest_ > 2 * recent.last() - recent.first() + kGrace) continue;
      kept.number(index_.keys()[at]);
      recent_[n] = recent;
      std::copy_n(values_.begin() + at * width_, width_, values_.begin() + n * width_);
      ++n;
    }
    recent_.resize(n);
    values_.resize(n * width_);
    index_ = std::move(kept);
    limit_ = std::max(kLeast, 2 * n);
  }

  int64_t dim_, width_;
  int32_t newest_ = 0;
  int64_t limit_ = kLeast;
  KeyIndex index_;
  std::vector<RecentPushes> recent_;
  std::vector<float> values_;  // (rows, width): sums, then, for Adam and FTRL, moved
  std::vector<float> spare_;
};

}  // namespace hetmpi
