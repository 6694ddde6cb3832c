// CudaRowCache: RowCache (cache/row_cache.h) in a GPU's memory: the same calls, words and invariants, and the same
// lines, clocks and rows bit for bit after the same calls.
//
// All arrays of a batch lie in the memory of the GPU `device` or in pinned memory of the host, which it reads and
// writes in place, except where said; the calls run on the caller's stream and return before they are done, except
// where said: arrays live until then. Pushes are kept here until take_pushes(). Errors of CUDA are std::runtime_error;
// where memory is short for a call, no line has changed. NaNs may have other bits than on the CPU.
// REQUIRES of all calls: one stream at a time; slots as for RowCache, and in range.
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
  // What has been counted since the cache was made; the first two as of now.
  struct Counts {
    int64_t rows, pending, stale, evicted;
  };

  // As RowCache; all memory is taken at once.
  CudaRowCache(int64_t capacity_rows, RowOptimizer optimizer, Policy policy, RowType type = RowType::kFloat32,
               int device = 0);
  ~CudaRowCache();

  int device() const;
  int64_t capacity_rows() const;
  int64_t num_slots() const;
  const RowOptimizer& optimizer() const;

  void set_step(double lr, int64_t step);
  void look_up(const int64_t* keys, int64_t n, int64_t* slots, Stream stream) const;
  void use(const int64_t* slots, int64_t n, int64_t num_keys, Stream stream);
  // lags of the lines that are not stale are counted if `counts_lags`.
  void validate(const int64_t* slots, const int32_t* owner_clocks, int64_t n, int64_t staleness, uint8_t* is_stale,
                bool counts_lags, Stream stream);
  void refresh(const int64_t* slots, const uint8_t* chosen, const float* weights, const float* states,
               const int32_t* clocks, int64_t n, float anticipate, Stream stream);
  // Returns when done.
  void insert_and_evict(const int64_t* keys, const uint8_t* chosen, const float* weights, const float* states,
                        const int32_t* clocks, int64_t n, int64_t* slots, Stream stream);
  // Entries without a line get their row of `others` (n, dim), unless that is null.
  void gather(const int64_t* slots, int64_t n, const float* others, float* out, Stream stream) const;
  void update(const int64_t* slots, const float* grads, int64_t n, float anticipate, Stream stream);
  void clocks_within(const int64_t* slots, int64_t n, bool will_write, int64_t staleness, int32_t* clocks,
                     Stream stream) const;
  // c_c and u (n) of lines, -1 for none.
  void look_at(const int64_t* slots, int64_t n, int32_t* clocks, int32_t* counts, Stream stream) const;
  // Returns when done.
  void pass_on(const int64_t* keys, const int64_t* slots, const int32_t* clocks, const float* grads, int64_t n,
               Stream stream);
  // held (num_held): sorted. Returns when done.
  void take_pending(const int64_t* slots, int64_t n, int64_t staleness, const int64_t* held, int64_t num_held,
                    Stream stream);
  // Returns when done.
  void take_all(Stream stream);

  // The pushes since the last call, in the host's memory. Returns when done.
  Pushes take_pushes(Stream stream);
  int64_t num_pushes() const;
  // Keys of the pushes, valid until pushes are added or taken. Returns when done.
  const std::vector<int64_t>& keys_handed_out(Stream stream);
  // In the host's memory; return when done.
  Counts counts(Stream stream) const;
  LagHistogram lags(Stream stream) const;

 private:
  struct Memory;
  std::unique_ptr<Memory> memory_;
};

// Why this process can use no GPU; empty if it can.
std::string gpu_problem();

// Whether this lies in the memory of the GPU `device`, or in memory of the host that GPUs can use.
bool can_use(int device, const void* memory);

}  // namespace hetmpi
