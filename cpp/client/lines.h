// Lines: the seam between a client and the cache of rows, in host memory (host_lines.h, by RowCache's calls in
// brackets) or on a GPU (cuda/gpu_lines.h). Terms: cache/row_cache.h.
//
//   ask     finds the line of each key, and the clocks of usable ones, which owners compare with theirs; the answer may
//           be on its way while the host goes on (look_up, clocks_within)
//   judge   begins an iteration with the lines found; tells which are too old by their owners' clocks (use, validate)
//   accept  replaces the rows of lines by those of their owners; pending sums are applied on top (refresh)
//   rows    the rows of all keys, where the model reads them (gather)
//   insert  gives keys a line, which may evict others: their sums are released; the slots are there after await_slots()
//           (insert_and_evict)
//   update  adds gradients to the sums of lines and previews them; those of keys without a line are released
//   due     releases the sums that must be pushed (release_due); take returns all that were released. Late ones are
//           taken separately: so the host need not wait until a GPU has computed the last gradients
//
// Arrays of n keys: slots, -1 for none; clocks of the owners. Buffers are from allocate(), which a GPU can read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <utility>

#include "buffer.h"
#include "cache/cache_decisions.h"
#include "cache/released_sums.h"

namespace hetmpi {

// Rows or gradients (n, dim) where the model computes. memory: keeps them.
struct ModelRows {
  float* at = nullptr;
  int64_t num = 0;
  std::shared_ptr<void> memory;
};

// Number of keys that have a line. Slots and clocks asked for are there once it is known.
class Found {
 public:
  Found(int64_t num = 0) : num_(num) {}
  explicit Found(std::function<int64_t()> awaited) : awaited_(std::move(awaited)) {}

  int64_t num() {
    if (awaited_) num_ = std::exchange(awaited_, nullptr)();
    return num_;
  }

 private:
  int64_t num_ = 0;
  std::function<int64_t()> awaited_;
};

inline int64_t num_lines(const Buffer<int64_t>& slots) {
  return std::count_if(slots.begin(), slots.end(), [](int64_t slot) { return slot >= 0; });
}

// Of the chosen keys.
inline int64_t num_missing(const Buffer<int64_t>& slots, const Buffer<uint8_t>& chosen) {
  int64_t num = 0;
  for (int64_t i = 0; i < slots.size(); ++i) num += slots[i] < 0 && chosen[i];
  return num;
}

class Lines {
 public:
  struct Form {
    int64_t capacity_rows, dim, preview_dim, sum_dim;
    bool computes_beside;  // whether another processor computes the model
  };

  explicit Lines(Form form) : form_(form) {}
  virtual ~Lines() = default;
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;

  const Form& form() const { return form_; }
  int64_t capacity_rows() const { return form_.capacity_rows; }

  virtual std::shared_ptr<void> allocate(int64_t num_bytes) {
    return {::operator new(num_bytes), [](void* memory) { ::operator delete(memory); }};
  }
  template <typename T>
  Buffer<T> empty(int64_t n) {
    return {allocate(n * sizeof(T)), n};
  }

  // Learning rate and step of the updates that follow.
  virtual void set_step(double lr, int64_t step) = 0;
  // known (n), or empty: as RowCache::clocks_within.
  virtual Found ask(const Buffer<int64_t>& keys, const Buffer<int64_t>& slots, const Buffer<int32_t>& known,
                    bool will_write, int64_t bound) = 0;
  // Whether judge() reads the clocks of the owners itself, if all are on this node.
  virtual bool reads_clocks() const { return false; }
  // clocks (n): of the owners. is_fetched (n): keys whose line is not judged; null for none. num_keys: that may have a
  // line. is_stale (n). Returns how many are. Without a bound no line is stale: clocks and is_stale may be empty.
  virtual int64_t judge(const Buffer<int64_t>& keys, const Buffer<int64_t>& slots, const uint8_t* is_fetched,
                        const Buffer<int32_t>& clocks, int64_t num_keys, int64_t bound,
                        const Buffer<uint8_t>& is_stale) = 0;
  virtual void accept(const Buffer<int64_t>& slots, const Buffer<uint8_t>& chosen, const Buffer<float>& weights,
                      const Buffer<float>& states, const Buffer<int32_t>& clocks, float anticipate) = 0;
  // From lines, or from weights (n, dim) for keys without a line. slots empty: no key has one. weights empty: all have
  // one, and another processor computes the model.
  virtual ModelRows rows(const Buffer<int64_t>& slots, const Buffer<float>& weights, int64_t n) = 0;
  // Rows (n, dim) for insert().
  virtual ModelRows moved(const Buffer<float>& weights, int64_t n) = 0;
  // Returns the number of keys chosen without a line before.
  virtual int64_t insert(const Buffer<int64_t>& keys, const Buffer<uint8_t>& chosen, const ModelRows& weights,
                         const Buffer<float>& states, const Buffer<int32_t>& clocks, const Buffer<int64_t>& slots) = 0;
  virtual void await_slots() {}
  // num_without: keys without a line.
  virtual void update(const Buffer<int64_t>& keys, const Buffer<int64_t>& slots, const Buffer<int32_t>& clocks,
                      const ModelRows& grads, int64_t num_without, float anticipate) = 0;
  virtual void due(const Buffer<int64_t>& slots, int64_t bound, bool is_late) = 0;
  // REQUIRES: no late sums.
  virtual void due_all() = 0;
  // Lines evicted since the last call, as far as known: all after await_slots().
  virtual int64_t num_evicted() = 0;
  virtual int64_t num_released(bool late) = 0;
  virtual std::shared_ptr<ReleasedSums> take(bool late) = 0;

 private:
  Form form_;
};

}  // namespace hetmpi
