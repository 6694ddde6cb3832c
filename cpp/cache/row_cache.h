// RowCache: a rank's copies of rows, with the gradients that are not pushed yet.
//
// Set-associative: a key may be in any way of one set. Structure of arrays indexed by slot (set * kWays + way), the
// same layout on CPU and GPU; decisions shared by both are in cache_decisions.h. Calls take batches of unique keys. The
// keys of one use() are one iteration; clocks count iterations.
//
//   look_up           slot of each key, or -1
//   use               begins an iteration, which uses the lines looked up
//   validate          finds the lines that are too old to be read, given their owners' clocks
//   refresh           replaces lines by the owners' rows; a pending sum stays pending and is applied on top
//   insert_and_evict  assigns a line to keys without one: an empty line of the set, otherwise the one of least worth.
//                     Lines used in this iteration stay, so a key may get none (-1). Pending sums of evicted lines are
//                     added to the released sums
//   gather            copies rows by slot
//   update            adds one iteration's gradients by slot to the pending sums, and applies them to the rows as a
//                     preview of the owner's update, scaled by `anticipate`
//   release_directly  adds the gradients of keys without a line to the released sums
//   clocks_within     clocks of usable lines, from which an owner determines the lines that are too old
//   release_due, release_all   move pending sums to the released sums: those by slot that are due at a staleness; all
//
// REQUIRES of all calls: slots are -1 (skipped) or were returned for a key that has not been evicted since; no slot
// occurs twice in a batch. insert_and_evict: keys without a slot are not in the cache.
//
// Terms, per line (c_s and c_c as in HET, section 3.2):
//   clock  c_c: the owner's clock when the row was fetched, plus own updates since (plus those pending or held then)
//   age    c_c - c_s: own updates since the row was fetched; kDrifted for a line that drifted
//   count  u: own updates since the last push; iterations in the pending sum
//
// Invariants:
//   tag[slot] == 0 if and only if the line is empty; a key is in at most one line, of the set of its hash;
//   count > 0 if and only if pending >= 0; a pending line belongs to one slot or is free;
//   every gradient passed to update is returned exactly once, by release_due, release_all or insert_and_evict;
//   weight[slot] is the fetched row with all own updates since, and all pending then, applied to it, in 16 bits up to
//   rounding; capacity 0 is legal: no key is found and no key gets a line.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "cache/cache_decisions.h"
#include "cache/huge_array.h"
#include "cache/released_sums.h"
#include "cache/row_type.h"
#include "owner/push_history.h"
#include "owner/row_optimizer.h"
#include "vectors.h"

namespace hetmpi {

// RowOptimizer::update of a row in 32 or in 16 bits.
HETMPI_CLONES static inline Moved updated(const RowOptimizer& optimizer, float* sums, int32_t count, float* weight,
                                          float* mean_square, const float* grad, float scale, int32_t own,
                                          bool limits_drift) {
  return optimizer.update(sums, count, weight, mean_square, grad, scale, own, limits_drift);
}
HETMPI_CLONES static inline Moved updated(const RowOptimizer& optimizer, float* sums, int32_t count, HalfRow weight,
                                          float* mean_square, const float* grad, float scale, int32_t own,
                                          bool limits_drift) {
  return optimizer.update(sums, count, weight, mean_square, grad, scale, own, limits_drift);
}

// A sum (sum_dim) over `count` iterations as a gradient; computes the squares of a single one.
inline Gradient summed(const RowOptimizer& optimizer, float* sums, int32_t count, float scale) {
  if (count == 1) optimizer.square(sums + optimizer.dim(), sums, Serially());
  return optimizer.summed(sums, sums + optimizer.dim(), count, scale);
}

// Applies sums (m, sum_dim), over counts (m) iterations, that the owners have not received to fetched rows: to those at
// `positions` (m), -1 for none, of weights (n, dim), states (n, preview_dim) and clocks (n), as refresh() does with
// pending sums. The sums' own clocks (m) become those of the rows: they now count as gradients of the fetched rows.
inline void preview_sums(const RowOptimizer& optimizer, const int64_t* positions, int64_t m, float* sums,
                         const int32_t* counts, int32_t* sum_clocks, float anticipate, float* weights, float* states,
                         int32_t* clocks) {
  for (int64_t i = 0; i < m; ++i) {
    const int64_t j = positions[i];
    if (j < 0) continue;
    optimizer.preview(weights + j * optimizer.dim(), states + j * optimizer.preview_dim(),
                      summed(optimizer, sums + i * optimizer.sum_dim(), counts[i], anticipate));
    clocks[j] += counts[i];
    sum_clocks[i] = clocks[j];
  }
}

class RowCache {
 public:
  // capacity_rows above kWays is rounded down to whole sets. Memory is allocated as lines are filled. type: of the
  // cached rows; pending sums and optimizer state are floats.
  RowCache(int64_t capacity_rows, RowOptimizer optimizer, Policy policy, RowType type = RowType::kFloat32)
      : optimizer_(optimizer),
        dim_(optimizer.dim()),
        preview_dim_(optimizer.preview_dim()),
        sum_dim_(optimizer.sum_dim()),
        policy_(policy),
        type_(type),
        shape_(capacity_rows) {
    const int64_t slots = num_slots();
    tag_.assign(slots, 0);
    key_.resize(slots);
    worth_.assign(slots, 0);
    line_.assign(slots, Line{});
    weight_ = HugeArray((slots * dim_ * bytes_of(type_) + 3) / 4);
    pending_ = HugeArray(slots * sum_dim_);
    free_pending_.reserve(slots);  // else it would double, beyond kLineOverhead
  }

  // Allocates the memory of all lines, as HugeArray::populate.
  void populate(const std::atomic<bool>& stop) const {
    weight_.populate(stop);
    pending_.populate(stop);
  }

  int64_t capacity_rows() const { return shape_.capacity_rows(); }
  int64_t num_slots() const { return shape_.num_slots(); }
  int64_t num_rows() const { return num_rows_; }
  int64_t num_pending() const { return num_pending_; }
  int64_t dim() const { return dim_; }
  int64_t preview_dim() const { return preview_dim_; }
  int64_t sum_dim() const { return sum_dim_; }
  // c_c of a line.
  int32_t clock(int64_t slot) const { return line_[slot].clock; }
  // u of a line.
  int32_t count(int64_t slot) const { return line_[slot].count; }
  // Bytes of one line without its row and its pending sum: an element of line_, tag_, key_, worth_ and free_pending_.
  static constexpr int64_t kLineOverhead = 32 + 1 + 8 + 8 + 4;

  // most: limit of a line's drift in sizes of a row, 0 for none; others: number of other ranks.
  void set_drift(float most, float others) {
    drift_.most = most;
    drift_.others = others;
    for (Line& line : line_) line.moved = 0;
  }

  // Learning rate and step of the following previews.
  void set_step(double lr, int64_t step) {
    optimizer_.set_step(lr, step);
    step_ = static_cast<int32_t>(step);
  }

  // num_keys: number of keys looked up that may be cached.
  void use(const int64_t* slots, int64_t n, int64_t num_keys) {
    ++now_;
    age_scores(num_keys);
    for (int64_t i = 0; i < n; ++i)
      if (slots[i] >= 0) worth_[slots[i]] = next_worth(policy_, worth_[slots[i]], now_);
  }

  // In blocks and stages: each stage prefetches the memory of the next one.
  void look_up(const int64_t* keys, int64_t n, int64_t* slots) const {
    if (shape_.num_sets == 0) {
      std::fill_n(slots, n, -1);
      return;
    }
    constexpr int64_t kBlock = 64;
    uint64_t hashes[kBlock];
    uint32_t candidates[kBlock];  // one bit per way
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t m = std::min(kBlock, n - begin);
      for (int64_t i = 0; i < m; ++i) {
        hashes[i] = mix64(static_cast<uint64_t>(keys[begin + i]));
        __builtin_prefetch(&tag_[first_slot(hashes[i])]);
      }
      for (int64_t i = 0; i < m; ++i) {
        const int64_t first = first_slot(hashes[i]);
        candidates[i] = ways_tagged(first, tag_of(hashes[i]));
        if (candidates[i] == 0) continue;
        const int64_t likely = first + __builtin_ctz(candidates[i]);
        __builtin_prefetch(&key_[likely]);
        __builtin_prefetch(&worth_[likely], 1);
        __builtin_prefetch(&line_[likely], 1);  // for validate and update, which follow
      }
      for (int64_t i = 0; i < m; ++i) slots[begin + i] = match(candidates[i], first_slot(hashes[i]), keys[begin + i]);
    }
  }

  // owner_clocks (n). Sets is_stale (n) to 1 for lines that are too old to be read at `staleness`, otherwise to 0, and
  // adds the lags of the others to `lags`, which may be null. Returns the number of stale lines. Without a bound no
  // line is stale, and owner_clocks may be null.
  int64_t validate(const int64_t* slots, const int32_t* owner_clocks, int64_t n, int64_t staleness, uint8_t* is_stale,
                   LagHistogram* lags) const {
    int64_t num_stale = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t slot = slots[i];
      is_stale[i] = 0;
      if (slot < 0 || staleness == kUnbounded) continue;
      is_stale[i] = !is_valid(owner_clocks[i], line_[slot].clock, line_[slot].age, staleness);
      if (is_stale[i])
        ++num_stale;
      else if (lags != nullptr)
        ++lags->bins[LagHistogram::bin_of(static_cast<int64_t>(owner_clocks[i]) - line_[slot].clock)];
    }
    return num_stale;
  }

  // For entries that are `chosen` (n): weights (n, dim), states (n, preview_dim), clocks (n) as read from the owners.
  void refresh(const int64_t* slots, const uint8_t* chosen, const float* weights, const float* states,
               const int32_t* clocks, int64_t n, float anticipate) {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t slot = slots[i];
      if (slot < 0 || !chosen[i]) continue;
      set_row(slot, weights + i * dim_, states + i * preview_dim_);
      Line& line = line_[slot];
      const int32_t count = line.count;
      line.age = 0;
      line.moved = 0;
      line.clock = clocks[i] + count;
      if (count == 0) continue;
      const Gradient sum = summed(optimizer_, pending(slot), count, anticipate);
      if (type_ == RowType::kFloat32)
        optimizer_.preview(weight(slot), state(slot), sum);
      else
        optimizer_.preview(half_row(slot), state(slot), sum, Serially());
    }
  }

  // For entries that are `chosen` (n) and have no slot yet; weights, states, clocks as for refresh. Sets slots (n),
  // appends the released sums to `out`, returns the number of evicted lines.
  int64_t insert_and_evict(const int64_t* keys, const uint8_t* chosen, const float* weights, const float* states,
                           const int32_t* clocks, int64_t n, int64_t* slots, ReleasedSums* out) {
    if (shape_.num_sets == 0) return 0;
    int64_t num_evicted = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n && slots[i + kAhead] < 0) prefetch_set(mix64(static_cast<uint64_t>(keys[i + kAhead])));
      if (slots[i] >= 0 || !chosen[i]) continue;
      const uint64_t hash = mix64(static_cast<uint64_t>(keys[i]));
      const int64_t slot = slots[i] = place(hash);
      if (slot < 0) continue;
      if (tag_[slot] == 0)
        ++num_rows_;
      else
        ++num_evicted;
      release_pending(slot, out);
      tag_[slot] = tag_of(hash);
      key_[slot] = keys[i];
      worth_[slot] = first_worth(policy_, now_);
      line_[slot].clock = clocks[i];
      line_[slot].age = 0;
      line_[slot].moved = 0;
      set_row(slot, weights + i * dim_, states + i * preview_dim_);
    }
    return num_evicted;
  }

  // Frees the lines of keys (n) that have one. REQUIRES: no sums are pending.
  void forget(const int64_t* keys, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      int64_t slot;
      look_up(keys + i, 1, &slot);
      if (slot < 0) continue;
      tag_[slot] = 0;
      worth_[slot] = 0;
      --num_rows_;
    }
  }

  // out[i] = row of slots[i]; out (n, dim)
  void gather(const int64_t* slots, int64_t n, float* out) const {
    for (int64_t i = 0; i < n; ++i) {
      prefetch_ahead(slots, n, i, false);
      if (slots[i] >= 0) get_row(slots[i], out + i * dim_);
    }
  }

  // grads (n, dim)
  void update(const int64_t* slots, const float* grads, int64_t n, float anticipate) {
    drift_.begin();
    const bool limits_drift = drift_.most > 0;
    const bool is_plain = optimizer_.is_plain() && !limits_drift && type_ == RowType::kFloat32;
    for (int64_t i = 0; i < n; ++i) {
      prefetch_ahead(slots, n, i, true);
      prefetch_next(grads + i * dim_, dim_);
      const int64_t slot = slots[i];
      if (slot < 0) continue;
      Line& line = line_[slot];
      if (line.pending < 0) open_pending(slot);
      line.steps.last = step_;
      const int32_t count = line.count++;
      line.age = next_age(line.age);
      ++line.clock;
      const int32_t own = updates_unseen(line.age, line.count);
      if (is_plain && count > 0) {
        add_and_subtract(pending(slot), weight(slot), optimizer_.plain_step(anticipate), grads + i * dim_, dim_);
        continue;
      }
      const auto update_row = [&](auto row) {
        return updated(optimizer_, pending(slot), count, row, state(slot), grads + i * dim_, anticipate, own,
                       limits_drift);
      };
      const Moved moved = type_ == RowType::kFloat32 ? update_row(weight(slot)) : update_row(half_row(slot));
      if (limits_drift) move(&line, moved);
    }
  }

  // clocks (n): c_c of lines that are usable if their owners' clocks allow it, otherwise kNoLine: keys without a line,
  // or lines with more than `staleness` own updates, including the one that follows if `will_write` for lines used in
  // this iteration.
  void clocks_within(const int64_t* slots, int64_t n, bool will_write, int64_t staleness, int32_t* clocks) const {
    for (int64_t i = 0; i < n; ++i) {
      clocks[i] = kNoLine;
      if (slots[i] < 0) continue;
      const Line& line = line_[slots[i]];
      const bool is_written = will_write && last_use_in(worth_[slots[i]]) == now_;
      if (is_young(line.age, is_written, staleness)) clocks[i] = line.clock;
    }
  }

  // For entries without a line: appends their gradients to the released sums. clocks (n): of the owners when the rows
  // were read, or kUnknownClock.
  void release_directly(const int64_t* keys, const int64_t* slots, const int32_t* clocks, const float* grads, int64_t n,
                        ReleasedSums* out) const {
    for (int64_t i = 0; i < n; ++i)
      if (slots[i] < 0)
        optimizer_.add(out->append(keys[i], next_clock(clocks[i]), {1, {step_, step_}}, sum_dim_), 0, grads + i * dim_,
                       Serially());
  }

  // Takes the pending sums of `slots` that are due at `staleness`.
  void release_due(const int64_t* slots, int64_t n, int64_t staleness, ReleasedSums* out) {
    for (int64_t i = 0; i < n; ++i)
      if (slots[i] >= 0 && is_due(line_[slots[i]].count, line_[slots[i]].age, staleness))
        release_pending(slots[i], out);
  }

  // Takes all pending sums, in the order of their slots.
  void release_all(ReleasedSums* out) {
    for (int64_t slot = 0; slot < num_slots(); ++slot) release_pending(slot, out);
  }

 private:
  static constexpr int64_t kAhead = 16;     // sets prefetched
  static constexpr int64_t kStage = 32;     // lines prefetched together by prefetch_ahead()
  static constexpr int64_t kRowsAhead = 8;  // rows and sums prefetched: several processor cache lines each

  // Fields of a line besides its row, in one processor cache line.
  struct alignas(32) Line {
    int32_t clock = 0, age = 0, count = 0;
    int32_t pending = -1;  // index of its pending sum
    Steps steps{};         // of that sum
    float state = 0;       // of the optimizer; unused with preview_dim 0
    float moved = 0;       // of Drift
  };
  static_assert(sizeof(Line) == 32);

  float* weight(int64_t slot) { return weight_.at(slot * dim_); }
  const float* row_at(int64_t slot) const { return weight_.at(slot * dim_ * bytes_of(type_) / 4); }
  uint16_t* halves(int64_t slot) { return reinterpret_cast<uint16_t*>(weight_.at(0)) + slot * dim_; }
  const uint16_t* halves(int64_t slot) const { return reinterpret_cast<const uint16_t*>(weight_.at(0)) + slot * dim_; }
  HalfRow half_row(int64_t slot) { return HalfRow(halves(slot), type_, row_seed(key_[slot], line_[slot].clock)); }
  float* state(int64_t slot) { return &line_[slot].state; }
  float* pending(int64_t slot) { return pending_.at(line_[slot].pending * sum_dim_); }
  const float* pending(int64_t slot) const { return pending_.at(line_[slot].pending * sum_dim_); }
  int64_t first_slot(uint64_t hash) const { return static_cast<int64_t>(set_of(hash, shape_.num_sets)) * kWays; }

  void set_row(int64_t slot, const float* row, const float* row_state) {
    if (type_ == RowType::kFloat32)
      std::memcpy(weight(slot), row, dim_ * sizeof(float));
    else
      for (int64_t d = 0; d < dim_; ++d) halves(slot)[d] = narrowed(row[d], type_, kNearest);
    if (preview_dim_ > 0) line_[slot].state = *row_state;
  }

  void get_row(int64_t slot, float* out) const {
    if (type_ == RowType::kFloat32)
      std::memcpy(out, weight_.at(slot * dim_), dim_ * sizeof(float));
    else
      for (int64_t d = 0; d < dim_; ++d) out[d] = widened(halves(slot)[d], type_);
  }

  // Counts an update to the drift of its line.
  void move(Line* line, const Moved& moved) {
    line->moved += moved.step_square;
    if (drift_.is_exceeded(line->moved, line->age)) line->age = kDrifted;
    drift_.total += Drift::units_of(moved.row_square);
    ++drift_.count;
  }

  void age_scores(int64_t num_uses) {
    if (!ageing_.is_due(policy_, num_uses, capacity_rows())) return;
    for (uint64_t& worth : worth_) worth = aged_worth(worth);
  }

  // Bit i: whether way i of the set that begins at slot `first` has this tag.
  uint32_t ways_tagged(int64_t first, uint8_t tag) const {
#ifdef __SSE2__
    static_assert(kWays == 32);
    const __m128i wanted = _mm_set1_epi8(static_cast<char>(tag));
    const auto* tags = reinterpret_cast<const __m128i*>(&tag_[first]);
    const int low = _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_loadu_si128(tags), wanted));
    const int high = _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_loadu_si128(tags + 1), wanted));
    return static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 16;
#else
    uint32_t bits = 0;
    for (int way = 0; way < kWays; ++way) bits |= static_cast<uint32_t>(tag_[first + way] == tag) << way;
    return bits;
#endif
  }

  // The slot among the candidate ways that holds `key`, or -1.
  int64_t match(uint32_t candidates, int64_t first, int64_t key) const {
    for (; candidates != 0; candidates &= candidates - 1) {
      const int64_t slot = first + __builtin_ctz(candidates);
      if (key_[slot] == key) return slot;
    }
    return -1;
  }

  // A line for a key with this hash: the first empty one, otherwise the one of least worth that is not used in this
  // iteration; or -1.
  int64_t place(uint64_t hash) const {
    const int64_t first = first_slot(hash);
    const uint32_t all = shape_.ways == kWays ? ~0u : (1u << shape_.ways) - 1;
    const uint32_t empty = ways_tagged(first, 0) & all;
    if (empty != 0) return first + __builtin_ctz(empty);
    int64_t victim = -1;
    for (int64_t slot = first; slot < first + shape_.ways; ++slot) {
      if (last_use_in(worth_[slot]) == now_) continue;
      if (victim < 0 || worth_[slot] < worth_[victim]) victim = slot;
    }
    return victim;
  }

  void open_pending(int64_t slot) {
    if (free_pending_.empty()) free_pending_.push_back(num_pending_lines_++);
    line_[slot].pending = free_pending_.back();
    free_pending_.pop_back();
    line_[slot].steps.first = step_;
    ++num_pending_;
  }

  // Moves the pending sum of a line, if it has one, to `out`.
  void release_pending(int64_t slot, ReleasedSums* out) {
    Line& line = line_[slot];
    if (line.pending < 0) return;
    const Iterations of{line.count, line.steps};
    const int64_t num_defined = line.count == 1 ? dim_ : sum_dim_;
    std::memcpy(out->append(key_[slot], line.clock, of, sum_dim_), pending(slot), num_defined * sizeof(float));
    free_pending_.push_back(line.pending);
    line.pending = -1;
    line.count = 0;
    --num_pending_;
  }

  HETMPI_PREFETCHES void prefetch_set(uint64_t hash) const {
    const int64_t first = first_slot(hash);
    __builtin_prefetch(&tag_[first]);
    for (int way = 0; way < kWays; way += 8) __builtin_prefetch(&worth_[first + way], 1);
  }

  // Asks for the memory of the lines that a loop over n slots reaches after place i. In stages: the fields of a line,
  // for a loop that writes; the first bytes of its row, and of its sum for a loop that writes; all of both. The first
  // bytes of kStage lines are asked for at once, so that the processor translates their addresses side by side:
  // translating an address takes longer than reading the memory.
  HETMPI_PREFETCHES void prefetch_ahead(const int64_t* slots, int64_t n, int64_t i, bool writes) const {
    if (i % kStage == 0) {
      const bool begins = i == 0;
      if (writes) prefetch_lines(slots, begins ? 0 : std::min(n, i + 2 * kStage), std::min(n, i + 3 * kStage));
      prefetch_first_bytes(slots, begins ? 0 : std::min(n, i + kStage), std::min(n, i + 2 * kStage), writes);
    }
    const int64_t next = i + kRowsAhead < n ? slots[i + kRowsAhead] : -1;
    if (next < 0) return;
    prefetch_row(row_at(next), dim_ * bytes_of(type_) / 4);
    if (writes && line_[next].pending >= 0) prefetch_row(pending(next), sum_dim_);
  }

  HETMPI_PREFETCHES void prefetch_lines(const int64_t* slots, int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; ++i)
      if (slots[i] >= 0) __builtin_prefetch(&line_[slots[i]], 1);
  }

  HETMPI_PREFETCHES void prefetch_first_bytes(const int64_t* slots, int64_t begin, int64_t end, bool writes) const {
    for (int64_t i = begin; i < end; ++i) {
      if (slots[i] < 0) continue;
      __builtin_prefetch(row_at(slots[i]), 1);
      if (writes && line_[slots[i]].pending >= 0) __builtin_prefetch(pending(slots[i]), 1);
    }
  }

  RowOptimizer optimizer_;  // of the previews
  int64_t dim_, preview_dim_, sum_dim_;
  Policy policy_;
  RowType type_;
  Shape shape_;
  int64_t num_rows_ = 0, num_pending_ = 0;
  uint32_t now_ = 0;  // iteration
  int32_t step_ = 0;
  Ageing ageing_;
  std::vector<uint8_t> tag_;
  std::vector<int64_t> key_;
  std::vector<uint64_t> worth_;
  std::vector<Line> line_;
  HugeArray weight_;   // (slots, dim) of type_
  HugeArray pending_;  // (pending lines, sum_dim)
  Drift drift_;
  int32_t num_pending_lines_ = 0;  // allocated so far
  std::vector<int32_t> free_pending_;
};

}  // namespace hetmpi
