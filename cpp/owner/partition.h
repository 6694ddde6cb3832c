// Partition: owner of each key, and its row in the owner's shard. A bijection between keys [0, num_rows) and pairs
// (owner, row), so shards have no holes.
//
//   round_robin  key k lives on rank k mod size, at row k div size: neighbouring keys spread over all ranks
//   range        rank r owns the contiguous keys [r * num_rows div size, (r + 1) * num_rows div size)
//   hash         round robin over scrambled keys, for key spaces in which popular keys share a remainder. Keys are
//                scrambled by a permutation of [0, num_rows): a four-round Feistel network over the next even number
//                of bits, iterated until the result is in range (Black and Rogaway, CT-RSA 2002, "cycle walking")
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "key_index.h"
#include "portable.h"

namespace hetmpi {

struct Place {
  int64_t owner, row;
};

class Partition {
 public:
  Partition(const std::string& kind, int64_t num_rows, int64_t size)
      : kind_(kind_of(kind)), num_rows_(num_rows), size_(size) {
    if (num_rows < 1) throw std::invalid_argument("num_rows must be at least 1, got " + std::to_string(num_rows));
    if (size < 1) throw std::invalid_argument("a partition needs at least 1 rank, got " + std::to_string(size));
    int bits = 0;
    for (int64_t last = num_rows - 1; last > 0; last >>= 1) ++bits;
    half_bits_ = bits < 2 ? 1 : (bits + 1) / 2;
  }

  int64_t size() const { return size_; }
  HETMPI_SHARED int64_t num_rows() const { return num_rows_; }

  // Rows of a rank's shard.
  int64_t num_local_rows(int64_t rank) const {
    return kind_ == Kind::kRange ? first_of(rank + 1) - first_of(rank) : (num_rows_ - rank + size_ - 1) / size_;
  }

  // REQUIRES: 0 <= key < num_rows.
  HETMPI_SHARED Place locate(int64_t key) const {
    if (size_ == 1 && kind_ != Kind::kHash) return {0, key};
    if (kind_ == Kind::kRange) {
      const int64_t owner = owner_in_ranges(key);
      return {owner, key - first_of(owner)};
    }
    const int64_t place = kind_ == Kind::kHash ? walk<false>(key) : key;
    const int64_t row = divided(place);
    return {place - row * size_, row};
  }

  // The inverse of locate.
  int64_t key_of(int64_t rank, int64_t row) const {
    if (kind_ == Kind::kRange) return first_of(rank) + row;
    const int64_t place = row * size_ + rank;
    return kind_ == Kind::kHash ? walk<true>(place) : place;
  }

 private:
  enum class Kind { kRoundRobin, kRange, kHash };

  // place / size_; 32 bits are divided faster than 64.
  HETMPI_SHARED int64_t divided(int64_t place) const {
    return (place | size_) >> 32 == 0 ? static_cast<uint32_t>(place) / static_cast<uint32_t>(size_) : place / size_;
  }

  static constexpr int kRounds = 4;

  static Kind kind_of(const std::string& kind) {
    if (kind == "round_robin") return Kind::kRoundRobin;
    if (kind == "range") return Kind::kRange;
    if (kind == "hash") return Kind::kHash;
    throw std::invalid_argument("table.partition must be one of round_robin, range, hash, got " + kind);
  }

  // rank * num_rows_ / size_, in parts that do not overflow. A division of 128 bits would call the compiler's own
  // library: zig's brings its logf and sinf, whose bits are not those of libm (tests/unit/test_row_init.py).
  HETMPI_SHARED int64_t first_of(int64_t rank) const {
    return rank * (num_rows_ / size_) + rank * (num_rows_ % size_) / size_;
  }

  // An estimate, at most a few ranks off because it is rounded, then the rank whose range holds the key.
  HETMPI_SHARED int64_t owner_in_ranges(int64_t key) const {
    auto owner = static_cast<int64_t>(static_cast<double>(key) * static_cast<double>(size_) / num_rows_);
    while (first_of(owner) > key) --owner;
    while (first_of(owner + 1) <= key) ++owner;
    return owner;
  }

  template <bool kInverse>
  HETMPI_SHARED int64_t walk(int64_t key) const {
    uint64_t value = static_cast<uint64_t>(key);
    do value = feistel<kInverse>(value);
    while (value >= static_cast<uint64_t>(num_rows_));
    return static_cast<int64_t>(value);
  }

  template <bool kInverse>
  HETMPI_SHARED uint64_t feistel(uint64_t value) const {
    const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
    uint64_t left = value >> half_bits_, right = value & mask;
    for (int i = 0; i < kRounds; ++i) {
      const uint64_t before_left = left;
      if (kInverse) {
        left = right ^ (round_hash(left, kRounds - 1 - i) & mask);
        right = before_left;
      } else {
        left = right;
        right = before_left ^ (round_hash(right, i) & mask);
      }
    }
    return (left << half_bits_) | right;
  }

  HETMPI_SHARED static uint64_t round_hash(uint64_t value, int round) {
    return mix64(value + (round + 1) * 0x9E3779B97F4A7C15ULL);
  }

  Kind kind_;
  int64_t num_rows_, size_;
  int half_bits_;
};

}  // namespace hetmpi
