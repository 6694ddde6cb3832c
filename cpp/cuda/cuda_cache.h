// CudaRowCache: RowCache (cache/row_cache.h) in GPU memory, with the same calls, terms and invariants. The same calls
// produce bitwise equal lines, clocks and rows.
//
// All arrays of a batch are in the memory of the GPU `device`, or in pinned host memory, which it accesses in place,
// unless noted. Calls are asynchronous on the caller's stream, unless noted: arrays must live until they are done.
// Released sums are kept here until take(). CUDA errors are thrown as std::runtime_error; if memory is short for a
// call, no line has changed. NaNs may have other bits than on the CPU. REQUIRES of all calls: slots
// as for RowCache, and in range; one stream at a time, but look_up may run in another one, beside all but
// insert_and_evict and forget, and clocks_within beside those that change no clock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache/cache_decisions.h"
#include "cache/row_cache.h"
#include "owner/row_optimizer.h"

namespace hetmpi {

using Stream = void*;  // cudaStream_t

class CudaRowCache {
 public:
  // Counters since creation; the first two are current values.
  struct Counts {
    int64_t rows, pending, stale, evicted;
  };

  // As RowCache, but allocates all memory at once.
  CudaRowCache(int64_t capacity_rows, RowOptimizer optimizer, Policy policy, RowType type = RowType::kFloat32,
               int device = 0);
  ~CudaRowCache();

  int device() const;
  int64_t capacity_rows() const;
  int64_t num_slots() const;
  const RowOptimizer& optimizer() const;

  void set_drift(float most, float others);
  void set_step(double lr, int64_t step);
  void look_up(const int64_t* keys, int64_t n, int64_t* slots, Stream stream) const;
  // As look_up, with the number of keys that have a line, in pinned memory. REQUIRES: there are lines; all
  // of these calls are in one stream.
  void find(const int64_t* keys, int64_t n, int64_t* slots, int64_t* num, Stream stream) const;
  void use(const int64_t* slots, int64_t n, int64_t num_keys, Stream stream);
  // Counts the lags of lines that are not stale if `counts_lags`.
  void validate(const int64_t* slots, const int32_t* owner_clocks, int64_t n, int64_t staleness, uint8_t* is_stale,
                bool counts_lags, Stream stream);
  void refresh(const int64_t* slots, const uint8_t* chosen, const float* weights, const float* states,
               const int32_t* clocks, int64_t n, float anticipate, Stream stream);
  // num_missing: of the n keys that are chosen and have no slot, or more. Returns the number of evicted lines. Waits
  // for the slots.
  int64_t insert_and_evict(const int64_t* keys, const uint8_t* chosen, const float* weights, const float* states,
                           const int32_t* clocks, int64_t n, int64_t num_missing, int64_t* slots, Stream stream);
  // As RowCache, by slots, which become invalid.
  void forget(const int64_t* slots, int64_t n, Stream stream);
  // Entries without a line are read from `others` (n, dim), unless that is null.
  void gather(const int64_t* slots, int64_t n, const float* others, float* out, Stream stream) const;
  void update(const int64_t* slots, const float* grads, int64_t n, float anticipate, Stream stream);
  void clocks_within(const int64_t* slots, int64_t n, bool will_write, int64_t staleness, int32_t* clocks,
                     Stream stream) const;
  // c_c and u (n) of lines, -1 for none.
  void look_at(const int64_t* slots, int64_t n, int32_t* clocks, int32_t* counts, Stream stream) const;
  // num: of the n keys without a slot.
  void push_directly(const int64_t* keys, const int64_t* slots, const int32_t* clocks, const float* grads, int64_t n,
                     int64_t num, Stream stream);
  // Waits for the number of sums.
  void take_pending(const int64_t* slots, int64_t n, int64_t staleness, Stream stream);
  // Synchronous.
  void take_all(Stream stream);

  // The released sums since the last call, in host memory. Synchronous.
  ReleasedSums take(Stream stream);
  int64_t num_released() const;
  // In host memory; synchronous.
  Counts counts(Stream stream) const;
  LagHistogram lags(Stream stream) const;

 private:
  struct Memory;
  std::unique_ptr<Memory> memory_;
};

// Reason why this process cannot use a GPU; empty if it can.
std::string gpu_problem(int device = 0);

}  // namespace hetmpi
