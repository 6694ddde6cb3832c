// IdMap: ids of a table without a fixed vocabulary, with their keys, how often and when they were seen. An owner has
// the ids whose hash falls to it, admitted or waiting; a client those that it has got a key for.
//
// Counts age: after every `every` steps they are halved, rounded down. A count is kept as of the step in which its id
// was last seen, so that ids that are not seen do not change.
//
// Open addressing over a power-of-two number of slots, linear probes, at most three quarters full. Ids are removed only
// by replacing all (assign).
//
// Invariants:
//   a slot is empty if its key is kNone; kWaiting is an id without a key; all keys are >= 0;
//   an id's probe sequence passes no empty slot before the id's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "key_index.h"

namespace hetmpi {

class IdMap {
 public:
  static constexpr int64_t kWaiting = -1, kNone = -2;

  struct Entry {
    int64_t id = 0, key = kNone;
    int64_t count = 0;  // times seen, aged until `last`
    int64_t last = 0;   // step in which it was seen last
  };

  explicit IdMap(int64_t every) : slots_(kFewest), every_(every) {}

  int64_t size() const { return size_; }
  int64_t num_admitted() const { return num_admitted_; }

  // Keys of ids (n), kWaiting for those without one. Adds counts (n) of `step`, if not null, to those that have a key.
  void look_up(const int64_t* ids, int64_t n, const int64_t* counts, int64_t step, int64_t* keys) {
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) prefetch(ids[i + kAhead]);
      Entry& entry = slots_[place(ids[i])];
      keys[i] = entry.key < 0 ? kWaiting : entry.key;
      if (counts == nullptr || entry.key < 0) continue;
      age(&entry, step);
      entry.count += counts[i];
    }
  }

  // Adds counts (n) of `step` to ids, which wait if they are new. Calls ready(i) for one that waits and whose count
  // reaches `least` by this.
  template <typename Ready>
  void see(const int64_t* ids, const int64_t* counts, int64_t n, int64_t step, int64_t least, Ready ready) {
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) prefetch(ids[i + kAhead]);
      Entry& entry = added(ids[i]);
      age(&entry, step);
      const bool was_ready = entry.count >= least;
      entry.count += counts[i];
      if (entry.key == kWaiting && !was_ready && entry.count >= least) ready(i);
    }
  }

  // Adds the counts of entries (n), seen until their steps, to the same ids where they are admitted.
  void add_counts(const Entry* entries, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) prefetch(entries[i + kAhead].id);
      Entry& entry = slots_[place(entries[i].id)];
      if (entry.key < 0) continue;
      Entry more = entries[i];
      age(&more, entry.last);
      age(&entry, more.last);
      entry.count += more.count;
    }
  }

  // Gives ids (n) these keys. Those that are new are added, not seen yet.
  void admit(const int64_t* ids, const int64_t* keys, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      Entry& entry = added(ids[i]);
      num_admitted_ += (keys[i] >= 0) - (entry.key >= 0);
      entry.key = keys[i];
    }
  }

  // Calls use(entry) for all ids.
  template <typename Use>
  void for_each(Use use) {
    for (Entry& entry : slots_)
      if (entry.key != kNone) use(entry);
  }

  // Replaces all ids.
  void assign(const Entry* entries, int64_t n) {
    slots_.assign(slots_for(n), Entry{});
    size_ = num_admitted_ = 0;
    for (int64_t i = 0; i < n; ++i) {
      added(entries[i].id) = entries[i];
      num_admitted_ += entries[i].key >= 0;
    }
  }

  // Bytes of memory.
  int64_t nbytes() const { return static_cast<int64_t>(slots_.size() * sizeof(Entry)); }

 private:
  // Halves the count of an entry as often as it ages from `last` to a later step.
  void age(Entry* entry, int64_t step) const {
    if (step <= entry->last) return;
    entry->count >>= std::min<int64_t>(63, step / every_ - entry->last / every_);
    entry->last = step;
  }

  static constexpr size_t kFewest = 64;
  static constexpr int64_t kAhead = 8;  // slots prefetched

  static size_t slots_for(int64_t n) {
    size_t size = kFewest;
    while (3 * size < 4 * static_cast<size_t>(n + 1)) size *= 2;
    return size;
  }

  size_t first(int64_t id) const { return mix64(static_cast<uint64_t>(id) + kGolden) & (slots_.size() - 1); }
  HETMPI_PREFETCHES void prefetch(int64_t id) const { __builtin_prefetch(&slots_[first(id)], 1); }

  // The slot of an id, or an empty one.
  size_t place(int64_t id) const {
    size_t at = first(id);
    while (slots_[at].key != kNone && slots_[at].id != id) at = (at + 1) & (slots_.size() - 1);
    return at;
  }

  // The entry of an id, which waits if it is new.
  Entry& added(int64_t id) {
    size_t at = place(id);
    if (slots_[at].key != kNone) return slots_[at];
    if (4 * static_cast<size_t>(size_ + 1) > 3 * slots_.size()) {
      grow();
      at = place(id);
    }
    ++size_;
    slots_[at] = Entry{id, kWaiting, 0, 0};
    return slots_[at];
  }

  void grow() {
    std::vector<Entry> before(2 * slots_.size());
    before.swap(slots_);
    for (const Entry& entry : before)
      if (entry.key != kNone) slots_[place(entry.id)] = entry;
  }

  static constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ULL;

  std::vector<Entry> slots_;
  int64_t size_ = 0, num_admitted_ = 0, every_;
};

// The rank of `size` whose directory has an id: by the upper half of a hash of which IdMap uses the lower.
inline int64_t directory_of(int64_t id, int64_t size) {
  const uint64_t hash = mix64(mix64(static_cast<uint64_t>(id)) + 0x632be59bd9b4e019ULL);
  return static_cast<int64_t>(((hash >> 32) * static_cast<uint64_t>(size)) >> 32);
}

}  // namespace hetmpi
