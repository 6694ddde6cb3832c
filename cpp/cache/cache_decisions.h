// Decisions of a cache, shared by the CPU and the GPU: set of a key, line to evict, freshness of a line. Integers only,
// so that both make the same decisions.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "key_index.h"
#include "portable.h"

namespace hetmpi {

constexpr int kWays = 32;                // lines of a set: one warp on the GPU
constexpr uint32_t kLfuOptLimit = 10;    // maximum count of HET's light LFU
constexpr int64_t kUnbounded = -1;       // staleness without a bound
constexpr int32_t kUnknownClock = -1;    // of a row that was written without being read
constexpr int32_t kDrifted = INT32_MAX;  // age of a line that has to be fetched whatever the bound
constexpr int32_t kNoLine = -1;          // sent to an owner instead of a line's clock: the row is needed at any clock

// lru      evicts the least recently used line
// lfu      evicts the least frequently used line; counts are halved periodically, so that old uses lose weight
// lfuopt   HET's light LFU: as lfu, but counts stop at kLfuOptLimit; they are halved too, where HET's pins such lines
enum class Policy : int32_t { kLru, kLfu, kLfuOpt };

inline Policy policy_of(const std::string& name) {
  if (name == "lru") return Policy::kLru;
  if (name == "lfu") return Policy::kLfu;
  if (name == "lfuopt") return Policy::kLfuOpt;
  throw std::invalid_argument("cache policy must be lru, lfu or lfuopt, got " + name);
}

HETMPI_SHARED uint64_t set_of(uint64_t hash, uint64_t num_sets) { return (hash >> 32) * num_sets >> 32; }

// 1 to 255; 0 marks an empty line.
HETMPI_SHARED uint8_t tag_of(uint64_t hash) {
  const uint8_t tag = static_cast<uint8_t>(hash);
  return tag == 0 ? 1 : tag;
}

// Worth of a line: its score in the upper half, the iteration of its last use in the lower. The least one is evicted.
HETMPI_SHARED uint64_t worth_of(uint32_t score, uint32_t used) { return static_cast<uint64_t>(score) << 32 | used; }
HETMPI_SHARED uint32_t score_in(uint64_t worth) { return static_cast<uint32_t>(worth >> 32); }
HETMPI_SHARED uint32_t last_use_in(uint64_t worth) { return static_cast<uint32_t>(worth); }

HETMPI_SHARED uint64_t first_worth(Policy policy, uint32_t now) {
  return worth_of(policy == Policy::kLru ? 0 : 1, now);
}

HETMPI_SHARED uint64_t next_worth(Policy policy, uint64_t worth, uint32_t now) {
  const uint32_t score = score_in(worth);
  const bool counts = policy == Policy::kLfu ? score < UINT32_MAX : policy == Policy::kLfuOpt && score < kLfuOptLimit;
  return worth_of(score + counts, now);
}

HETMPI_SHARED uint64_t aged_worth(uint64_t worth) { return worth_of(score_in(worth) / 2, last_use_in(worth)); }

// HET's CheckValid has two conditions. The line has at most `staleness` own updates since it was fetched, including the
// one that follows if `is_written`:
HETMPI_SHARED bool is_young(int32_t age, bool is_written, int64_t staleness) {
  return age != kDrifted && (staleness == kUnbounded || int64_t{age} + is_written <= staleness);
}

// and the owner's clock is at most `staleness` ahead of the line's:
HETMPI_SHARED bool is_current(int64_t owner_clock, int64_t line_clock, int64_t staleness) {
  return staleness == kUnbounded || owner_clock <= line_clock + staleness;
}

HETMPI_SHARED bool is_valid(int64_t owner_clock, int64_t line_clock, int32_t age, int64_t staleness) {
  return is_young(age, false, staleness) && is_current(owner_clock, line_clock, staleness);
}

// Between nodes the requester sees to the first condition and sends the clock of its line, kNoLine without a usable
// one. Whether the reply has the row, evaluated at owner and requester alike:
HETMPI_SHARED bool must_send(int64_t owner_clock, int32_t line_clock, int64_t staleness) {
  return line_clock == kNoLine || !is_current(owner_clock, line_clock, staleness);
}

// Age of a line after one more update.
HETMPI_SHARED int32_t next_age(int32_t age) { return age == kDrifted ? age : age + 1; }

// Own updates that a line's fetched state lacks: those since the fetch, or more that were pending then.
HETMPI_SHARED int32_t updates_unseen(int32_t age, int32_t count) { return age < count ? count : age; }

// Clock of a row after one more update.
HETMPI_SHARED int32_t next_clock(int32_t clock) { return clock == kUnknownClock ? kUnknownClock : clock + 1; }

// Whether a line's pending sum must be pushed.
HETMPI_SHARED bool is_due(int32_t count, int32_t age, int64_t staleness) {
  return (staleness != kUnbounded && count > staleness) || (count > 0 && age == kDrifted);
}

// Limits how far a row may move away from a line. The line does not see the moves of the other ranks. If each of them
// makes as many as this rank, as large and independent, the mean square of their sum is `others` times the sum of the
// mean squares of this rank's own: the error of a use. A line has drifted when the errors of its uses since the fetch
// add up to more than `most` squared times the size of a row: the mean square of the numbers of the rows updated
// lately. With r as the growth of the error per use, a fetch every k uses leaves a mean error of r k / 2. That and 1 /
// k fetches per use cost least together where k grows with 1 / root(r): this sum does, a limit of the error itself
// would not.
struct Drift {
  float most = 0;  // 0: no limit
  float others = 0;
  float size = 0;  // mean square of a number of a row; 0 before the first update
  // Of the last update: sum of mean squares in units of 1 / kUnits, an integer so that its sum has no order.
  uint64_t total = 0, count = 0;

  static constexpr float kUnits = 1 << 24, kLargest = 1 << 20;
  static constexpr float kForget = 1.0f / 16;

  HETMPI_SHARED static uint64_t units_of(float mean_square) {
    return static_cast<uint64_t>((mean_square < kLargest ? mean_square : kLargest) * kUnits);
  }

  // Begins an update.
  HETMPI_SHARED void begin() {
    if (count == 0) return;
    const float mean = static_cast<float>(total) / static_cast<float>(count) / kUnits;
    size = size == 0 ? mean : size + kForget * (mean - size);
    total = count = 0;
  }

  // moved: sum of the mean squares of a line's own moves, `age` in number, since it was fetched. The errors of these
  // uses add up to about half of the last one times their number.
  HETMPI_SHARED bool is_exceeded(float moved, int32_t age) const {
    return size > 0 && others * moved * (static_cast<float>(age) + 1) > 2 * most * most * size;
  }
};

// Histogram of the lags of read lines behind their owners: bin 0 for no lag, bin i for lags in [2^(i-1), 2^i).
struct LagHistogram {
  static constexpr int kBins = 32;
  int64_t bins[kBins] = {};

  HETMPI_SHARED static int bin_of(int64_t lag) {
    int bin = 0;
    for (; lag > 0 && bin < kBins - 1; lag >>= 1) ++bin;
    return bin;
  }
};

// Lines per set and number of sets of a cache with at most capacity_rows lines. Throws std::invalid_argument for an
// impossible capacity.
struct Shape {
  int ways;
  int64_t num_sets;

  explicit Shape(int64_t capacity_rows) : ways(static_cast<int>(capacity_rows < kWays ? capacity_rows : kWays)) {
    if (capacity_rows < 0 || capacity_rows >= int64_t{1} << 31)
      throw std::invalid_argument("cache: capacity_rows must be at least 0 and below 2^31, got " +
                                  std::to_string(capacity_rows));
    num_sets = ways == 0 ? 0 : capacity_rows / ways;
  }

  int64_t capacity_rows() const { return num_sets * ways; }
  int64_t num_slots() const { return num_sets * kWays; }
};

// Decides when scores are halved: after a number of uses per line.
class Ageing {
 public:
  // Counts num_uses of a cache with capacity_rows lines. Returns whether scores must be halved now.
  bool is_due(Policy policy, int64_t num_uses, int64_t capacity_rows) {
    uses_ += num_uses;
    if (policy == Policy::kLru || uses_ < kAfter * capacity_rows) return false;
    uses_ = 0;
    return true;
  }

 private:
  static constexpr int64_t kAfter = 8;
  int64_t uses_ = 0;  // since scores were halved
};

}  // namespace hetmpi
