// Spans: time of one rank by part of a step (hetmpi/spans.py). Parts follow each other and are never nested.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <utility>

namespace hetmpi {

enum Part : int {
  kLoad,
  kVocabulary,
  kDrain,
  kFind,
  kValidate,
  kFetch,
  kPrefetch,
  kForward,
  kBackward,
  kPush,
  kAllreduce,
  kNumParts
};
constexpr std::array<const char*, kNumParts> kPartNames = {
    "load", "vocabulary", "drain", "find", "validate", "fetch", "prefetch", "forward", "backward", "push", "allreduce"};

class Spans {
 public:
  static constexpr size_t kTraced = 200'000;  // spans of a trace: the last ones

  struct Traced {
    Part part;
    double begin, end;  // seconds since 1970
  };

  explicit Spans(bool keeps_trace) : keeps_trace_(keeps_trace), epoch_(wall_s() - now_s()) {}

  void enter(Part part) {
    may_interleave(kPartNames[part]);
    doing_ = part;
    ++ticks_;
    began_[part] = now_s();
  }

  // Called where stores of other ranks could matter: a simulation lets them go on. next: the part that begins, ""
  // within one.
  void may_interleave(const char* next = "") const {
    if (on_pause) on_pause(next);
  }

  void leave(Part part) {
    const double ended = now_s();
    seconds_[part] += ended - began_[part];
    if (!keeps_trace_) return;
    trace_.push_back({part, began_[part] + epoch_, ended + epoch_});
    if (trace_.size() > kTraced) trace_.pop_front();
  }

  // Another activity begins, outside the parts of a step. Its text is read and written with Python's lock.
  void now(std::string doing) {
    text_ = std::move(doing);
    doing_ = kOutside;
    ++ticks_;
  }

  // The current activity, also of another thread; number of its changes.
  std::string doing() const {
    const int part = doing_;
    return part == kOutside ? text_ : kPartNames[part];
  }
  int64_t ticks() const { return ticks_; }

  const std::array<double, kNumParts>& seconds() const { return seconds_; }
  const std::deque<Traced>& trace() const { return trace_; }

  // Called by may_interleave(next), if set.
  std::function<void(const char* next)> on_pause;
  int64_t step = 0;  // current one, from 0

 private:
  static double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  static double wall_s() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  }

  static constexpr int kOutside = -1;

  bool keeps_trace_;
  double epoch_;
  std::array<double, kNumParts> began_{}, seconds_{};
  std::deque<Traced> trace_;
  std::string text_ = "set-up";
  std::atomic<int> doing_{kOutside};  // the part
  std::atomic<int64_t> ticks_{0};
};

// One part, until the end of a block.
class InPart {
 public:
  InPart(Spans& spans, Part part) : spans_(spans), part_(part) { spans_.enter(part_); }
  ~InPart() { spans_.leave(part_); }
  InPart(const InPart&) = delete;
  InPart& operator=(const InPart&) = delete;

 private:
  Spans& spans_;
  Part part_;
};

}  // namespace hetmpi
