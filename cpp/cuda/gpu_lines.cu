// Buffers that kernels use are kept until the kernels have run. That is known once the host has waited for the stream,
// or sees that an event after them has happened.
#include "cuda/gpu_lines.h"

#include <algorithm>
#include <utility>

#include "cuda/cache_streams.h"
#include "cuda/device.h"

namespace hetmpi {
namespace {

cudaStream_t on(Stream stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

GpuLines::GpuLines(int64_t capacity_rows, const RowOptimizer& rule, Policy policy, RowType type, int device,
                   Stream stream, Model model)
    : Lines({Shape(capacity_rows).capacity_rows(), rule.dim(), rule.preview_dim(), rule.sum_dim(), true}),
      cache_(capacity_rows, rule, policy, type, device),
      model_(std::move(model)) {
  const OnDevice here(device);
  int least, greatest;  // decisions before other kernels that wait: the host waits for them
  cudaStream_t deciding;
  HETMPI_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  HETMPI_CHECK(cudaStreamCreateWithPriority(&deciding, cudaStreamNonBlocking, greatest));
  deciding_ = deciding;
  streams_ = std::make_unique<CacheStreams>(device, deciding, stream);
}

GpuLines::~GpuLines() {
  streams_ = nullptr;  // waits
  if (cudaStreamDestroy(on(deciding_)) != cudaSuccess) cudaGetLastError();
}

std::shared_ptr<void> GpuLines::allocate(int64_t num_bytes) { return streams_->host_memory->take(num_bytes); }

void GpuLines::set_drift(float most, float others) {
  has_drift_ = most > 0;
  cache_.set_drift(most, others);
}

LagHistogram GpuLines::lags() const { return cache_.lags(deciding_); }

void GpuLines::read_clocks_of(const Partition& partition, const std::vector<const int32_t*>& clocks) {
  if (capacity_rows() == 0) return;
  partition_ = partition;
  clocks_ = empty<const int32_t*>(clocks.size());
  std::copy(clocks.begin(), clocks.end(), clocks_.begin());
}

void GpuLines::forget(const int64_t* keys, int64_t n) {
  const auto forgotten = empty<int64_t>(n), slots = empty<int64_t>(n);
  std::copy_n(keys, n, forgotten.data());
  cache_.look_up(forgotten.data(), n, slots.data(), deciding_);
  cache_.forget(slots.data(), n, deciding_);
  streams_->await_decisions();
}

void GpuLines::clocks(const int64_t* slots, int64_t n, int32_t* clocks) {
  const auto asked = empty<int64_t>(n);
  const auto found = empty<int32_t>(n), counts = empty<int32_t>(n);
  std::copy_n(slots, n, asked.data());
  cache_.look_at(asked.data(), n, found.data(), counts.data(), deciding_);
  streams_->await_decisions();
  std::copy_n(found.data(), n, clocks);
}

void GpuLines::set_step(double lr, int64_t step) { cache_.set_step(lr, step); }

Found GpuLines::ask(const Buffer<int64_t>& keys, const Buffer<int64_t>& slots, const Buffer<int32_t>& known,
                    bool will_write, int64_t bound) {
  if (capacity_rows() == 0) {
    std::fill(slots.begin(), slots.end(), -1);
    std::fill(known.begin(), known.end(), kNoLine);
    return 0;
  }
  const auto num = empty<int64_t>(1);
  cache_.find(keys.data(), keys.size(), slots.data(), num.data(), deciding_);
  if (known.size() > 0) cache_.clocks_within(slots.data(), slots.size(), will_write, bound, known.data(), deciding_);
  keep_for_decisions(keys, slots, known, num);
  const auto answer = streams_->decided.record(on(deciding_));
  return Found([this, num, answer] {
    streams_->decided.wait_for(answer);
    return num[0];
  });
}

int64_t GpuLines::judge(const Buffer<int64_t>& keys, const Buffer<int64_t>& slots, const uint8_t* is_fetched,
                        const Buffer<int32_t>& clocks, int64_t num_keys, int64_t bound,
                        const Buffer<uint8_t>& is_stale) {
  const int64_t n = slots.size();
  keep_for_decisions(slots);
  cache_.use(slots.data(), n, num_keys, deciding_);
  if (bound == kUnbounded) {  // no clock is compared
    std::fill(is_stale.begin(), is_stale.end(), 0);
    return 0;
  }
  Buffer<int64_t> judged = slots;
  if (is_fetched != nullptr) {
    judged = empty<int64_t>(n);
    for (int64_t i = 0; i < n; ++i) judged[i] = is_fetched[i] ? -1 : slots[i];
  } else if (reads_clocks()) {
    cache_.read_clocks(*partition_, clocks_.data(), keys.data(), n, clocks.data(), deciding_);
  }
  const auto num_stale = empty<int64_t>(1);
  cache_.validate(judged.data(), clocks.data(), n, bound, is_stale.data(), num_stale.data(), true, deciding_);
  streams_->await_decisions();
  return num_stale[0];
}

void GpuLines::accept(const Buffer<int64_t>& slots, const Buffer<uint8_t>& chosen, const Buffer<float>& weights,
                      const Buffer<float>& states, const Buffer<int32_t>& clocks, float anticipate) {
  keep_for_decisions(slots, chosen, clocks);
  keep_for_moves(slots, chosen, weights, states);
  cache_.refresh(slots.data(), chosen.data(), weights.data(), states.data(), clocks.data(), slots.size(), anticipate,
                 *streams_);
}

ModelRows GpuLines::rows(const Buffer<int64_t>& slots, const Buffer<float>& weights, int64_t n) {
  streams_->moved.collect();
  cache_.move_out(*streams_);  // before the model computes: the host takes what leaves then without waiting for it
  const ModelRows rows = model_.rows(n);
  keep_for_moves(slots, weights);
  if (slots.size() == n && capacity_rows() > 0) {
    const OnDevice here(cache_.device());
    const int64_t* at = slots.data();
    if (weights.size() > 0) {  // insert() may change the slots before the rows are moved
      auto* const now = streams_->snapshot<int64_t>(n);
      HETMPI_CHECK(cudaMemcpyAsync(now, at, n * sizeof(int64_t), cudaMemcpyHostToDevice, streams_->deciding()));
      at = now;
    }
    streams_->move_after_decisions();
    cache_.gather(at, n, weights.data(), rows.at, streams_->moving());
  } else if (n > 0) {
    const OnDevice here(cache_.device());
    HETMPI_CHECK(cudaMemcpyAsync(rows.at, weights.data(), n * form().dim * sizeof(float), cudaMemcpyHostToDevice,
                                 streams_->moving()));
  }
  give_to_model();
  return rows;
}

ModelRows GpuLines::moved(const Buffer<float>& weights, int64_t n) { return {weights.data(), n, weights.memory()}; }

int64_t GpuLines::insert(const Buffer<int64_t>& keys, const Buffer<uint8_t>& chosen, const ModelRows& weights,
                         const Buffer<float>& states, const Buffer<int32_t>& clocks, const Buffer<int64_t>& slots) {
  const int64_t num = num_missing(slots, chosen);
  if (num == 0) return 0;
  keep_for_decisions(keys, chosen, clocks, slots);
  streams_->moved.keep(weights.memory);
  keep_for_moves(states, slots);
  cache_.insert_and_evict(keys.data(), chosen.data(), weights.at, states.data(), clocks.data(), slots.size(),
                          slots.data(), *streams_);
  give_to_model();  // which may change the rows
  return num;
}

void GpuLines::await_slots() { cache_.move_out(*streams_); }

void GpuLines::update(const Buffer<int64_t>& keys, const Buffer<int64_t>& slots, const Buffer<int32_t>& clocks,
                      const ModelRows& grads, int64_t num_without, float anticipate) {
  streams_->moved.collect();
  cache_.move_out(*streams_);
  take_from_model();
  keep_for_decisions(slots);
  keep_for_moves(slots);
  cache_.update(slots.data(), grads.at, slots.size(), anticipate, *streams_);
  keep_for_moves(keys, slots, clocks);  // update() has ended what is kept for it
  try {
    cache_.release_directly(keys.data(), slots.data(), clocks.data(), grads.at, slots.size(), num_without, *streams_);
  } catch (...) {
    give_to_model();
    throw;
  }
  give_to_model();  // which may change the gradients
}

void GpuLines::due(const Buffer<int64_t>& slots, int64_t bound, bool is_late) {
  if (bound == kUnbounded && !has_drift_) return;  // none is due
  keep_for_decisions(slots);
  cache_.due(slots.data(), slots.size(), bound, is_late, *streams_);
}

void GpuLines::due_all() { cache_.due_all(*streams_); }

int64_t GpuLines::num_evicted() {
  const int64_t before = std::exchange(num_evicted_, cache_.num_evicted());
  return num_evicted_ - before;
}

int64_t GpuLines::num_released(bool late) { return cache_.num_released(late, *streams_); }

std::shared_ptr<ReleasedSums> GpuLines::take(bool late) {
  const auto released = std::make_shared<ReleasedSums>(cache_.take(late, *streams_));
  model_.refuse_if_nan(*released);
  return released;
}

// The model's stream waits for what is moved.
void GpuLines::give_to_model() {
  const OnDevice here(cache_.device());  // torch's default stream is null, that of the current device
  streams_->moved.hand_over(streams_->moving(), on(model_.stream()), true);
}

void GpuLines::take_from_model() {
  const OnDevice here(cache_.device());
  streams_->moved.hand_over(on(model_.stream()), streams_->moving(), false);
}

template <typename... Buffers>
void GpuLines::keep_for_decisions(const Buffers&... buffers) {
  (streams_->decided.keep(buffers.memory()), ...);
}

template <typename... Buffers>
void GpuLines::keep_for_moves(const Buffers&... buffers) {
  (streams_->moved.keep(buffers.memory()), ...);
}

}  // namespace hetmpi
