// GpuLines: lines in a GPU's memory (CudaRowCache), in two CUDA streams beside the model's.
//
// The host asks for each decision about a batch, and reads the answer: buffers are in pinned memory, which kernels read
// and write in place.
// Rows, and their gradients, are in GPU memory: the model's stream waits for rows, that of moves for gradients. Fetched
// rows are in pinned memory; the GPU reads the new ones, once. Sums are copied to the host when they are to be sent.
//
// Which keys have a line, and their clocks, are decided in a stream of their own, which without drift waits for no
// gradient: the host learns them while the model computes (cache_streams.h). The GPU counts the lines: if each key has
// one, the host looks at none.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "client/lines.h"
#include "cuda/cuda_cache.h"

namespace hetmpi {

class GpuLines : public Lines {
 public:
  // The model on the same GPU.
  struct Model {
    std::function<ModelRows(int64_t n)> rows;                     // memory (n, dim) for the stream of the lines
    std::function<Stream()> stream;                               // in which the model computes
    std::function<void(const ReleasedSums& sums)> refuse_if_nan;  // throws for sums that are not finite
  };

  // stream: of moves, another one than the model's; the caller keeps it. Allocates all memory of the lines at once.
  GpuLines(int64_t capacity_rows, const RowOptimizer& rule, Policy policy, RowType type, int device, Stream stream,
           Model model);
  ~GpuLines() override;

  // Pinned memory, which later buffers use again. Thread-safe.
  std::shared_ptr<void> allocate(int64_t num_bytes) override;

  void set_drift(float most, float others);
  LagHistogram lags() const;
  // Clocks of the owners' shards, by rank, in memory of the host that kernels read in place; the caller keeps it.
  void read_clocks_of(const Partition& partition, const std::vector<const int32_t*>& clocks);
  // As RowCache.
  void forget(const int64_t* keys, int64_t n);
  // c_c of the line of each slot (n), -1 for none.
  void clocks(const int64_t* slots, int64_t n, int32_t* clocks);

  void set_step(double lr, int64_t step) override;
  Found ask(const Buffer<int64_t>& keys, const Buffer<int64_t>& slots, const Buffer<int32_t>& known, bool will_write,
            int64_t bound) override;
  bool reads_clocks() const override { return clocks_.size() > 0; }
  int64_t judge(const Buffer<int64_t>& keys, const Buffer<int64_t>& slots, const uint8_t* is_fetched,
                const Buffer<int32_t>& clocks, int64_t num_keys, int64_t bound,
                const Buffer<uint8_t>& is_stale) override;
  void accept(const Buffer<int64_t>& slots, const Buffer<uint8_t>& chosen, const Buffer<float>& weights,
              const Buffer<float>& states, const Buffer<int32_t>& clocks, float anticipate) override;
  ModelRows rows(const Buffer<int64_t>& slots, const Buffer<float>& weights, int64_t n) override;
  // In the memory of `weights`.
  ModelRows moved(const Buffer<float>& weights, int64_t n) override;
  int64_t insert(const Buffer<int64_t>& keys, const Buffer<uint8_t>& chosen, const ModelRows& weights,
                 const Buffer<float>& states, const Buffer<int32_t>& clocks, const Buffer<int64_t>& slots) override;
  void await_slots() override;
  void update(const Buffer<int64_t>& keys, const Buffer<int64_t>& slots, const Buffer<int32_t>& clocks,
              const ModelRows& grads, int64_t num_without, float anticipate) override;
  void due(const Buffer<int64_t>& slots, int64_t bound, bool is_late) override;
  void due_all() override;
  int64_t num_evicted() override;
  int64_t num_released(bool late) override;
  std::shared_ptr<ReleasedSums> take(bool late) override;

 private:
  void give_to_model();
  void take_from_model();
  template <typename... Buffers>
  void keep_for_decisions(const Buffers&... buffers);
  template <typename... Buffers>
  void keep_for_moves(const Buffers&... buffers);

  CudaRowCache cache_;
  Stream deciding_ = nullptr;
  Model model_;
  std::unique_ptr<CacheStreams> streams_;
  std::optional<Partition> partition_;
  Buffer<const int32_t*> clocks_;  // by rank
  int64_t num_evicted_ = 0;        // as of the last call of num_evicted()
  bool has_drift_ = false;
};

}  // namespace hetmpi
