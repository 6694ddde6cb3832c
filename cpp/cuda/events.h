// What kernels of a stream use, kept until they have run. Included only by .cu files.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/device.h"

namespace hetmpi {

// Events of a stream, in their order, each with what kernels before it use.
class StreamEvents {
 public:
  explicit StreamEvents(int device) : device_(device) {}
  StreamEvents(const StreamEvents&) = delete;
  StreamEvents& operator=(const StreamEvents&) = delete;

  ~StreamEvents() {
    for (const cudaEvent_t event : free_) cudaEventDestroy(event);
    for (const auto& [event, kept] : recorded_) cudaEventDestroy(event);
  }

  void keep(std::shared_ptr<const void> used) { kept_.push_back(std::move(used)); }

  // Makes `taker` wait for what `maker` was given so far. is_own: whether that is the stream of these events.
  void hand_over(cudaStream_t maker, cudaStream_t taker, bool is_own) {
    const cudaEvent_t event = recorded_in(maker);
    HETMPI_CHECK(cudaStreamWaitEvent(taker, event, 0));
    if (is_own)
      recorded_.emplace_back(event, std::exchange(kept_, {}));
    else
      free_.push_back(event);  // a stream waits for what the event was when it was told to
  }

  // Ends what is kept for the kernels given to the stream so far. Returns the number of their event.
  int64_t record(cudaStream_t stream) {
    recorded_.emplace_back(recorded_in(stream), std::exchange(kept_, {}));
    return num_past_ + static_cast<int64_t>(recorded_.size());
  }

  // Waits for an event, unless it has happened.
  void wait_for(int64_t number) {
    collect();
    if (number <= num_past_) return;
    HETMPI_CHECK(cudaEventSynchronize(recorded_[number - num_past_ - 1].first));
    while (num_past_ < number) let_go();
  }

  // Lets go of what kernels that have run used.
  void collect() {
    while (!recorded_.empty()) {
      const cudaError_t error = cudaEventQuery(recorded_.front().first);
      if (error == cudaErrorNotReady) {
        cudaGetLastError();  // clears it
        break;
      }
      HETMPI_CHECK(error);
      let_go();
    }
  }

  // All kernels of the stream have run.
  void collect_all() {
    while (!recorded_.empty()) let_go();
    kept_.clear();
  }

  // Waits for the last event.
  void wait() {
    if (!recorded_.empty()) HETMPI_CHECK(cudaEventSynchronize(recorded_.back().first));
    collect_all();
  }

 private:
  void let_go() {
    free_.push_back(recorded_.front().first);
    recorded_.pop_front();
    ++num_past_;
  }

  cudaEvent_t recorded_in(cudaStream_t stream) {
    cudaEvent_t event;
    if (free_.empty()) {
      const OnDevice here(device_);
      HETMPI_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    } else {
      event = free_.back();
      free_.pop_back();
    }
    const cudaError_t error = cudaEventRecord(event, stream);
    if (error != cudaSuccess) free_.push_back(event);
    HETMPI_CHECK(error);
    return event;
  }

  int device_;
  std::vector<cudaEvent_t> free_;
  int64_t num_past_ = 0;  // events that have happened and are let go
  std::deque<std::pair<cudaEvent_t, std::vector<std::shared_ptr<const void>>>> recorded_;
  std::vector<std::shared_ptr<const void>> kept_;  // of kernels after the last event
};

}  // namespace hetmpi
