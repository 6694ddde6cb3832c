// CudaRowCache: RowCache (cache/row_cache.h) in GPU memory, with the same calls, terms and invariants. The same calls
// produce bitwise equal lines, clocks and rows.
//
// All arrays of a batch are in the memory of the GPU `device`, or in pinned host memory, which it accesses in place,
// unless noted. Calls are asynchronous on the caller's streams, unless noted: arrays must live until they are done.
// Calls with one stream are for that of decisions, but gather() for that of moves (cache_streams.h). Released sums are
// kept here until take(). CUDA errors are thrown as std::runtime_error. NaNs may have other bits than on the CPU.
// REQUIRES of all calls: slots as for RowCache, and in range; the same streams.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cache/cache_decisions.h"
#include "cache/row_cache.h"
#include "owner/partition.h"
#include "owner/row_optimizer.h"

namespace hetmpi {

using Stream = void*;  // cudaStream_t

class CacheStreams;
// For decisions and moves.
std::shared_ptr<CacheStreams> one_stream(int device, Stream stream);

class CudaRowCache {
 public:
  // Counters since creation; the first two are current values, pending as of the last move_out().
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
  // As look_up, with the number of keys that have a line, in pinned memory. REQUIRES: there are lines.
  void find(const int64_t* keys, int64_t n, int64_t* slots, int64_t* num, Stream stream) const;
  void use(const int64_t* slots, int64_t n, int64_t num_keys, Stream stream);
  // Reads the clocks of keys (n) in the shards of their owners, addresses by rank.
  void read_clocks(const Partition& partition, const int32_t* const* shards, const int64_t* keys, int64_t n,
                   int32_t* clocks, Stream stream) const;
  // Raises the owners' clocks to what late sums will make them. Counts the lags of lines that are not stale if
  // `counts_lags`. num_stale: in pinned memory.
  void validate(const int64_t* slots, int32_t* owner_clocks, int64_t n, int64_t staleness, uint8_t* is_stale,
                int64_t* num_stale, bool counts_lags, Stream stream);
  void refresh(const int64_t* slots, const uint8_t* chosen, const float* weights, const float* states,
               const int32_t* clocks, int64_t n, float anticipate, CacheStreams& streams);
  void insert_and_evict(const int64_t* keys, const uint8_t* chosen, const float* weights, const float* states,
                        const int32_t* clocks, int64_t n, int64_t* slots, CacheStreams& streams);
  // As RowCache, by slots, which become invalid.
  void forget(const int64_t* slots, int64_t n, Stream stream);
  // Entries without a line are read from `others` (n, dim), unless that is null.
  void gather(const int64_t* slots, int64_t n, const float* others, float* out, Stream stream) const;
  void update(const int64_t* slots, const float* grads, int64_t n, float anticipate, CacheStreams& streams);
  void clocks_within(const int64_t* slots, int64_t n, bool will_write, int64_t staleness, int32_t* clocks,
                     Stream stream) const;
  // c_c and u (n) of lines, -1 for none.
  void look_at(const int64_t* slots, int64_t n, int32_t* clocks, int32_t* counts, Stream stream) const;
  // num: of the n keys without a slot.
  void release_directly(const int64_t* keys, const int64_t* slots, const int32_t* clocks, const float* grads, int64_t n,
                        int64_t num, CacheStreams& streams);
  // Releases the pending sums that must be pushed. Until late ones are taken, validate() takes the owners'
  // clocks for what they will be then. REQUIRES: those of an earlier call are taken.
  void due(const int64_t* slots, int64_t n, int64_t staleness, bool is_late, CacheStreams& streams);
  // Synchronous.
  void due_all(CacheStreams& streams);
  // Waits for the decisions. Begins to move the sums that leave to the host; to be called before update(), too.
  void move_out(CacheStreams& streams);

  // The released sums since the last call, or the late ones, in host memory. Waits until they are there.
  ReleasedSums take(bool late, CacheStreams& streams);
  // Waits for the decisions.
  int64_t num_released(bool late, CacheStreams& streams);
  // Since creation, as of the last move_out() or num_released().
  int64_t num_evicted() const;
  // In host memory; synchronous.
  Counts counts(Stream stream) const;
  LagHistogram lags(Stream stream) const;

 private:
  struct Memory;
  std::unique_ptr<Memory> memory_;
};

// Lets kernels of a GPU use memory of the host in place, until unpin().
void pin(void* memory, int64_t num_bytes, int device);
void unpin(void* memory);

// Reason why this process cannot use a GPU; empty if it can.
std::string gpu_problem(int device = 0);

}  // namespace hetmpi
