// A cache's decisions, for the CPU and the GPU alike: where a key may lie, which line is evicted, whether a line is
// fresh. Integers only, so that both come to the same decisions bit for bit.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "key_index.h"
#include "portable.h"

namespace hetmpi {

constexpr int kWays = 32;              // lines of a set: one warp on the GPU
constexpr uint32_t kLfuOptLimit = 10;  // HET's light LFU counts no further
constexpr int64_t kUnbounded = -1;     // staleness without a bound
constexpr int32_t kUnknownClock = -1;  // of a row that was written without being read
constexpr int32_t kNoLine = -1;  // said to an owner instead of a line's clock: the row is needed whatever its clock is

// lru      the line used longest ago goes
// lfu      the line used least often goes; counts are halved now and then, so that old fame fades
// lfuopt   HET's light LFU: as lfu, but counted up to kLfuOptLimit, and aged too, where HET's pins such lines for ever
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

// A line's worth: its score above, the iteration of its last use below. The line of least worth goes first.
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

// HET's CheckValid: at most `staleness` own updates since the line was fetched, and the owner's clock at most that far
// ahead of the line's own.
HETMPI_SHARED bool is_valid(int64_t owner_clock, int64_t line_clock, int32_t age, int64_t staleness) {
  return staleness == kUnbounded || (age <= staleness && owner_clock <= line_clock + staleness);
}

// The clock of a row after one more update of it.
HETMPI_SHARED int32_t next_clock(int32_t clock) { return clock == kUnknownClock ? kUnknownClock : clock + 1; }

// Whether a line will do if its owner's clock admits it: at most `staleness` own updates old, to which another one
// comes if `is_written`.
HETMPI_SHARED bool will_do(int32_t age, bool is_written, int64_t staleness) {
  return staleness == kUnbounded || age + is_written <= staleness;
}

// Whether a line's pending sum has to go to its owner.
HETMPI_SHARED bool is_due(int32_t count, int64_t staleness) { return staleness != kUnbounded && count > staleness; }

// How far behind the owners the lines read were: bin 0 is no lag, bin i lags of [2^(i-1), 2^i).
struct LagHistogram {
  static constexpr int kBins = 32;
  int64_t bins[kBins] = {};

  HETMPI_SHARED static int bin_of(int64_t lag) {
    int bin = 0;
    for (; lag > 0 && bin < kBins - 1; lag >>= 1) ++bin;
    return bin;
  }
};

// How many lines a set has, and how many sets there are, in a cache of at most capacity_rows lines. Throws for sizes
// that no cache can have.
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

// When scores are aged: after so many uses per line.
class Ageing {
 public:
  // Counts num_uses of a cache of so many lines; whether it is time now.
  bool is_due(Policy policy, int64_t num_uses, int64_t capacity_rows) {
    uses_ += num_uses;
    if (policy == Policy::kLru || uses_ < kAfter * capacity_rows) return false;
    uses_ = 0;
    return true;
  }

 private:
  static constexpr int64_t kAfter = 8;
  int64_t uses_ = 0;  // since the last time
};

}  // namespace hetmpi
