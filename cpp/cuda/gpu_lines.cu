// Buffers that kernels use are kept until the kernels have run. That is known once the host has waited for the stream,
// or sees that an event after them has happened.
#include "cuda/gpu_lines.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <vector>

#include "cuda/device.h"
#include "cuda/events.h"

namespace hetmpi {
namespace {

constexpr int64_t kLeastBytes = 256;

cudaStream_t on(Stream stream) { return static_cast<cudaStream_t>(stream); }

template <typename T>
bool any(const T* begin, int64_t n) {
  return std::any_of(begin, begin + n, [](T value) { return value != 0; });
}

}  // namespace

// Pinned memory by size, powers of two. Given back when the last buffer of it goes, which may outlive the lines.
class GpuLines::Pinned : public std::enable_shared_from_this<GpuLines::Pinned> {
 public:
  explicit Pinned(int device) : device_(device) {}

  ~Pinned() {
    for (const auto& [bytes, blocks] : free_)
      for (void* block : blocks)
        if (cudaFreeHost(block) != cudaSuccess) cudaGetLastError();
  }

  std::shared_ptr<void> take(int64_t num_bytes) {
    int64_t bytes = kLeastBytes;
    while (bytes < num_bytes) bytes *= 2;
    void* block = nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      std::vector<void*>& blocks = free_[bytes];
      if (!blocks.empty()) {
        block = blocks.back();
        blocks.pop_back();
      }
    }
    if (block == nullptr) {
      const OnDevice here(device_);
      HETMPI_CHECK(cudaMallocHost(&block, bytes));
    }
    return {block, [pool = shared_from_this(), bytes](void* memory) {
              const std::lock_guard<std::mutex> lock(pool->mutex_);
              pool->free_[bytes].push_back(memory);
            }};
  }

 private:
  int device_;
  std::mutex mutex_;
  std::map<int64_t, std::vector<void*>> free_;
};

GpuLines::GpuLines(int64_t capacity_rows, const RowOptimizer& rule, Policy policy, RowType type, int device,
                   Stream stream, Model model)
    : Lines({Shape(capacity_rows).capacity_rows(), rule.dim(), rule.preview_dim(), rule.sum_dim(), true}),
      cache_(capacity_rows, rule, policy, type, device),
      stream_(stream),
      model_(std::move(model)),
      pinned_(std::make_shared<Pinned>(device)),
      events_(std::make_unique<StreamEvents>(device)),
      asked_(std::make_unique<StreamEvents>(device)) {
  const OnDevice here(device);
  cudaStream_t asking;
  HETMPI_CHECK(cudaStreamCreateWithFlags(&asking, cudaStreamNonBlocking));
  asking_ = asking;
}

GpuLines::~GpuLines() {
  for (const Stream stream : {stream_, asking_})  // kernels use the buffers and the lines
    if (cudaStreamSynchronize(on(stream)) != cudaSuccess) cudaGetLastError();
  if (cudaStreamDestroy(on(asking_)) != cudaSuccess) cudaGetLastError();
}

std::shared_ptr<void> GpuLines::allocate(int64_t num_bytes) { return pinned_->take(num_bytes); }

void GpuLines::set_drift(float most, float others) {
  has_drift_ = most > 0;
  cache_.set_drift(most, others);
}

LagHistogram GpuLines::lags() const { return cache_.lags(stream_); }

void GpuLines::forget(const int64_t* keys, int64_t n) {
  const auto forgotten = empty<int64_t>(n), slots = empty<int64_t>(n);
  std::copy_n(keys, n, forgotten.data());
  await_answers();
  cache_.look_up(forgotten.data(), n, slots.data(), stream_);
  cache_.forget(slots.data(), n, stream_);
  wait();
}

void GpuLines::clocks(const int64_t* slots, int64_t n, int32_t* clocks) {
  const auto asked = empty<int64_t>(n);
  const auto found = empty<int32_t>(n), counts = empty<int32_t>(n);
  std::copy_n(slots, n, asked.data());
  cache_.look_at(asked.data(), n, found.data(), counts.data(), stream_);
  wait();
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
  cache_.find(keys.data(), keys.size(), slots.data(), num.data(), asking_);
  if (known.size() > 0) {  // updates change the clocks
    hand_over(stream_, asking_);
    cache_.clocks_within(slots.data(), slots.size(), will_write, bound, known.data(), asking_);
  }
  for (const auto& memory : {keys.memory(), slots.memory(), known.memory(), num.memory()}) asked_->keep(memory);
  const auto answer = asked_->record(on(asking_));
  return Found([this, num, answer] {
    asked_->wait_for(answer);
    return num[0];
  });
}

void GpuLines::judge(const Buffer<int64_t>& slots, const uint8_t* is_fetched, const Buffer<int32_t>& clocks,
                     int64_t num_keys, int64_t bound, const Buffer<uint8_t>& is_stale) {
  const int64_t n = slots.size();
  keep(slots);
  cache_.use(slots.data(), n, num_keys, stream_);
  if (bound == kUnbounded) {  // no clock is compared
    std::fill(is_stale.begin(), is_stale.end(), 0);
    return;
  }
  Buffer<int64_t> judged = slots;
  if (any(is_fetched, n)) {
    judged = empty<int64_t>(n);
    for (int64_t i = 0; i < n; ++i) judged[i] = is_fetched[i] ? -1 : slots[i];
  }
  cache_.validate(judged.data(), clocks.data(), n, bound, is_stale.data(), true, stream_);
  wait();
}

void GpuLines::accept(const Buffer<int64_t>& slots, const Buffer<uint8_t>& chosen, const Buffer<float>& weights,
                      const Buffer<float>& states, const Buffer<int32_t>& clocks, float anticipate) {
  keep(slots, chosen, weights, states, clocks);
  cache_.refresh(slots.data(), chosen.data(), weights.data(), states.data(), clocks.data(), slots.size(), anticipate,
                 stream_);
}

ModelRows GpuLines::rows(const Buffer<int64_t>& slots, const Buffer<float>& weights, int64_t n) {
  events_->collect();
  const ModelRows rows = model_.rows(n);
  keep(slots, weights);
  if (slots.size() == n && capacity_rows() > 0) {
    cache_.gather(slots.data(), n, weights.data(), rows.at, stream_);
  } else if (n > 0) {
    const OnDevice here(cache_.device());
    HETMPI_CHECK(
        cudaMemcpyAsync(rows.at, weights.data(), n * form().dim * sizeof(float), cudaMemcpyHostToDevice, on(stream_)));
  }
  hand_over(stream_, model_.stream());
  return rows;
}

ModelRows GpuLines::moved(const Buffer<float>& weights, int64_t n) { return {weights.data(), n, weights.memory()}; }

Inserted GpuLines::insert(const Buffer<int64_t>& keys, const Buffer<uint8_t>& chosen, const ModelRows& weights,
                          const Buffer<float>& states, const Buffer<int32_t>& clocks, const Buffer<int64_t>& slots) {
  const int64_t num = num_missing(slots, chosen);
  if (num == 0) return {0, 0};
  await_answers();
  const int64_t num_evicted = cache_.insert_and_evict(keys.data(), chosen.data(), weights.at, states.data(),
                                                      clocks.data(), slots.size(), num, slots.data(), stream_);
  return {num, num_evicted};
}

void GpuLines::update(const Buffer<int64_t>& keys, const Buffer<int64_t>& slots, const Buffer<int32_t>& clocks,
                      const ModelRows& grads, int64_t num_without, float anticipate) {
  events_->collect();
  const Stream models = model_.stream();
  hand_over(models, stream_);
  keep(keys, slots, clocks);
  cache_.update(slots.data(), grads.at, slots.size(), anticipate, stream_);
  try {
    cache_.push_directly(keys.data(), slots.data(), clocks.data(), grads.at, slots.size(), num_without, stream_);
  } catch (...) {
    hand_over(stream_, models);
    throw;
  }
  hand_over(stream_, models);  // which may change the gradients
}

void GpuLines::due(const Buffer<int64_t>& slots, int64_t bound) {
  if (bound == kUnbounded && !has_drift_) return;  // none is due, and the host need not wait
  cache_.take_pending(slots.data(), slots.size(), bound, stream_);
}

void GpuLines::due_all() { cache_.take_all(stream_); }

int64_t GpuLines::num_released() { return cache_.num_released(); }

std::shared_ptr<ReleasedSums> GpuLines::take() {
  const auto released = std::make_shared<ReleasedSums>(cache_.take(stream_));
  model_.refuse_if_nan(*released);
  return released;
}

void GpuLines::hand_over(Stream maker, Stream taker) {
  const OnDevice here(cache_.device());  // torch's default stream is null, that of the current device
  events_->hand_over(on(maker), on(taker), maker == stream_);
}

// Lets the lines' stream wait for look-ups that are under way.
void GpuLines::await_answers() {
  asked_->collect();
  if (!asked_->is_empty()) hand_over(asking_, stream_);
}

// Until all operations of the lines' stream have been done.
void GpuLines::wait() {
  HETMPI_CHECK(cudaStreamSynchronize(on(stream_)));
  events_->collect_all();
}

template <typename... Buffers>
void GpuLines::keep(const Buffers&... buffers) {
  (events_->keep(buffers.memory()), ...);
}

}  // namespace hetmpi
