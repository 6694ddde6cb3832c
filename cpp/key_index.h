// KeyIndex: numbers the distinct keys of a sequence in order of first appearance.
//
// Open addressing over a power-of-two table of int32 positions, at most half full. Memory is kept between uses, so
// successive batches allocate only while their size grows.
//
// Invariants:
//   keys()[i] is the i-th distinct key seen since clear();
//   slots_[j] is -1 or the position of a key whose probe sequence passes j;
//   fewer than 2^31 distinct keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "portable.h"

namespace hetmpi {

// Finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection on 64 bits that mixes every input bit.
HETMPI_SHARED uint64_t mix64(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

class KeyIndex {
 public:
  // Removes all keys and reserves memory for `expected` distinct ones.
  void clear(int64_t expected) {
    int64_t size = 16;
    while (size < 2 * expected) size *= 2;
    slots_.assign(size, -1);
    keys_.clear();
    keys_.reserve(expected);
  }

  // Number of `key`; assigns the next number to a new key.
  int32_t number(int64_t key) {
    if (2 * (keys_.size() + 1) > slots_.size()) grow();
    const int64_t slot = probe(key);
    if (slots_[slot] < 0) {
      slots_[slot] = static_cast<int32_t>(keys_.size());
      keys_.push_back(key);
    }
    return slots_[slot];
  }

  // Calls use(i, number of keys[i]) for all keys in order, until it returns false.
  template <typename Use>
  void number_each(const int64_t* keys, int64_t n, Use use) {
    constexpr int64_t kAhead = 8;  // slots prefetched
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) __builtin_prefetch(&slots_[first_slot(keys[i + kAhead])], 1);
      if (!use(i, number(keys[i]))) return;
    }
  }

  // Removes all keys, then sets numbers (n) to those of keys (n).
  void number_all(const int64_t* keys, int64_t n, int64_t* numbers) {
    clear(n);
    number_each(keys, n, [numbers](int64_t i, int32_t number) {
      numbers[i] = number;
      return true;
    });
  }

  // Removes all keys, then takes keys (n) up to the first that has occurred before: its position, -1 if all are
  // distinct.
  int64_t first_repeated(const int64_t* keys, int64_t n) {
    // The keys held already are distinct: often these, from number_all().
    if (n == size() && std::equal(keys, keys + n, keys_.begin())) return -1;
    clear(n);
    int64_t repeated = -1;
    number_each(keys, n, [&repeated](int64_t i, int32_t number) {
      if (number != i) repeated = i;
      return number == i;
    });
    return repeated;
  }

  // Number of `key`, -1 for a new key. REQUIRES: clear() or number() before.
  int32_t find(int64_t key) const { return slots_[probe(key)]; }

  bool contains(int64_t key) const { return find(key) >= 0; }

  const std::vector<int64_t>& keys() const { return keys_; }
  int64_t size() const { return static_cast<int64_t>(keys_.size()); }

 private:
  // The slot that contains `key`, or the empty slot for it.
  int64_t probe(int64_t key) const {
    uint64_t slot = first_slot(key);
    while (slots_[slot] >= 0 && keys_[slots_[slot]] != key) slot = (slot + 1) & (slots_.size() - 1);
    return static_cast<int64_t>(slot);
  }

  uint64_t first_slot(int64_t key) const { return mix64(static_cast<uint64_t>(key)) & (slots_.size() - 1); }

  void grow() {
    slots_.assign(slots_.empty() ? 16 : 2 * slots_.size(), -1);
    for (size_t i = 0; i < keys_.size(); ++i) slots_[probe(keys_[i])] = static_cast<int32_t>(i);
  }

  std::vector<int32_t> slots_;
  std::vector<int64_t> keys_;
};

}  // namespace hetmpi
