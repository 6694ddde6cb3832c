// Streams, events and memory of the emulated GPU.
//
// A stream is a queue. Its operations run in its order, after the events they wait for, and by no other rule: when the
// host waits, a random choice of those that may run does, of all streams, until what is waited for is done; and a few
// of them may run at any call. What the program under test did not wait for has therefore not happened, or has, by
// chance.
//
// Memory is filled with garbage when it is allocated and when it is given back. Memory of the host that the GPU uses
// (pinned) must be as it was when an operation that uses it was enqueued, apart from what operations write, until that
// operation has run. Copies from other memory of the host to the GPU are of the values of the call, as in CUDA.
#include <time.h>

#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>

#include "cuda_runtime.h"

namespace {

constexpr int kGarbage = 0xcd;

struct EventState {
  uint64_t recorded = 0, happened = 0;  // how often
};

struct Block {
  void* memory;
  size_t bytes;
  bool is_pinned;
  int num_uses = 0;                              // pinned: by operations that have not run
  uint64_t sum = 0;                              // checksum, while there are any
  cudaStream_t stream = nullptr;                 // of memory that is used again
  std::vector<cudaStream_t> other_streams = {};  // that were recorded for it
};

struct Operation {
  std::function<void()> work;
  std::vector<Block*> pinned = {};
  std::shared_ptr<EventState> event = nullptr;  // to record, or to wait for
  uint64_t number = 0;                          // of the event
  bool is_wait = false;

  bool may_run() const { return !is_wait || event->happened >= number; }
};

}  // namespace

struct CUstream_st {
  std::deque<Operation> waiting;
  uint64_t num_given = 0, num_done = 0;
};

struct CUevent_st {
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
};

namespace {

int64_t thread_ns() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

thread_local int64_t spent_ns = 0;
thread_local int depth = 0;

uint64_t checksum(const void* memory, size_t bytes) {
  const auto* at = static_cast<const uint8_t*>(memory);
  uint64_t sum = bytes;
  for (; bytes >= 8; bytes -= 8, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    sum = (sum ^ word) * 0x9e3779b97f4a7c15ull;
    sum ^= sum >> 29;
  }
  for (; bytes > 0; --bytes) sum = (sum ^ *at++) * 0x9e3779b97f4a7c15ull;
  return sum;
}

class Gpu {
 public:
  static Gpu& only() {
    static Gpu* gpu = new Gpu();  // never freed: calls come from destructors of other statics
    return *gpu;
  }

  std::recursive_mutex mutex;
  CudaOnCpuCounts counts = {};
  bool is_lazy = false;
  std::string fault;  // of cuda_on_cpu_leave_out
  cudaStream_t models = nullptr;

  void seed(uint64_t seed) { random_ = seed * 0x9e3779b97f4a7c15ull + 1; }

  uint64_t draw(uint64_t n) {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return (random_ >> 11) % n;
  }

  CUstream_st& stream(cudaStream_t stream) { return stream == nullptr ? *streams_[0] : *stream; }

  cudaStream_t make_stream() {
    streams_.push_back(new CUstream_st());
    return streams_.back();
  }

  void free_stream(cudaStream_t stream) {
    finish(*stream);
    streams_.erase(std::find(streams_.begin(), streams_.end(), stream));
    delete stream;
  }

  void enqueue(CUstream_st& stream, Operation operation, const std::vector<const void*>& uses = {}) {
    for (const void* memory : cuda_on_cpu::is_free ? std::vector<const void*>() : uses) {
      Block* block = block_of(memory);
      if (block == nullptr) cuda_on_cpu::fail("an operation uses memory that is not the GPU's, nor pinned");
      const auto& known = operation.pinned;
      if (block->is_pinned && std::find(known.begin(), known.end(), block) == known.end())
        operation.pinned.push_back(block);
    }
    for (Block* block : operation.pinned) {
      check_unchanged(*block, "was written by the host before an operation that uses it had run");
      if (block->num_uses++ == 0) block->sum = sum_of(*block);
    }
    stream.waiting.push_back(std::move(operation));
    ++stream.num_given;
    if (!is_lazy && draw(3) == 0)
      for (uint64_t steps = draw(6); steps > 0; --steps) run_any();
  }

  // Runs until all that the stream was given so far is done.
  void finish(CUstream_st& stream) {
    const uint64_t num = stream.num_given;
    const uint64_t way = is_lazy ? 0 : draw(3);
    while (stream.num_done < num) {
      if (way == 0 || !run_any(way == 1 ? nullptr : &stream)) run_towards(stream);
    }
    if (!is_lazy && draw(2) == 0)
      for (uint64_t steps = draw(12); steps > 0; --steps) run_any();
  }

  // Runs until the event has happened as often as it was recorded.
  void finish(const EventState& event) {
    const uint64_t recorded = event.recorded;
    while (event.happened < recorded) {
      if (is_lazy)
        run_towards(stream_that_records(event));
      else if (!run_any())
        return;
    }
  }

  void finish_all() {
    while (run_any()) {
    }
  }

  cudaError_t allocate(void** memory, size_t bytes, bool is_pinned, cudaStream_t stream = nullptr) {
    *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
    if (*memory == nullptr) return cudaErrorMemoryAllocation;
    spoil(*memory, bytes);
    Block block{*memory, bytes, is_pinned};
    block.stream = stream;
    blocks_[reinterpret_cast<uintptr_t>(*memory)] = block;
    return cudaSuccess;
  }

  void free(void* memory) {
    forget(memory);
    std::free(memory);
  }

  // Memory of the program.
  void pin(void* memory, size_t bytes) {
    if (block_of(memory) != nullptr) cuda_on_cpu::fail("memory is pinned twice");
    blocks_[reinterpret_cast<uintptr_t>(memory)] = {memory, bytes, true};
  }

  void forget(void* memory) {
    const auto at = blocks_.find(reinterpret_cast<uintptr_t>(memory));
    if (at == blocks_.end()) cuda_on_cpu::fail("memory is freed that was not allocated");
    blocks_.erase(at);
  }

  // The block that an address lies in, or null.
  Block* block_of(const void* memory) {
    auto after = blocks_.upper_bound(reinterpret_cast<uintptr_t>(memory));
    if (after == blocks_.begin()) return nullptr;
    --after;
    const uintptr_t offset = reinterpret_cast<uintptr_t>(memory) - after->first;
    return offset <= after->second.bytes ? &after->second : nullptr;
  }

  void* take(size_t bytes, bool is_pinned, cudaStream_t stream) {
    auto& same = again_[{is_pinned, stream, bytes}];
    void* memory = nullptr;
    if (same.empty()) {
      allocate(&memory, bytes, is_pinned, stream);
    } else {
      memory = same.back();
      same.pop_back();
    }
    return memory;
  }

  void give_back(void* memory) {
    Block& block = *block_of(memory);
    if (block.num_uses > 0) cuda_on_cpu::fail("pinned memory is freed before an operation that uses it has run");
    for (const cudaStream_t other : block.other_streams) {
      const auto event = std::make_shared<EventState>();
      record(stream(other), event);
      await(stream(block.stream), event);
    }
    block.other_streams.clear();
    const auto fill = [this, memory, bytes = block.bytes] { spoil(memory, bytes); };
    if (block.is_pinned)
      fill();
    else
      enqueue(stream(block.stream), {fill});
    again_[{block.is_pinned, block.stream, block.bytes}].push_back(memory);
  }

  void record(CUstream_st& stream, const std::shared_ptr<EventState>& event) {
    enqueue(stream, {{}, {}, event, ++event->recorded});
  }

  void await(CUstream_st& stream, const std::shared_ptr<EventState>& event) {
    if (event->happened < event->recorded) enqueue(stream, {{}, {}, event, event->recorded, true});
  }

 private:
  Gpu() {
    seed(1);
    make_stream();
  }

  void spoil(void* memory, size_t bytes) const {
    if (!cuda_on_cpu::is_free) std::memset(memory, kGarbage, bytes);
  }

  static uint64_t sum_of(const Block& block) { return checksum(block.memory, block.bytes); }

  void check_unchanged(const Block& block, const char* what) {
    if (block.num_uses > 0 && sum_of(block) != block.sum)
      cuda_on_cpu::fail((std::string("pinned memory ") + what).c_str());
  }

  void run_first(CUstream_st& stream) {
    Operation now = std::move(stream.waiting.front());
    stream.waiting.pop_front();
    for (Block* block : now.pinned)
      check_unchanged(*block, "has changed between the launch of an operation and its run");
    if (now.work) now.work();
    for (Block* block : now.pinned)
      if (--block->num_uses > 0) block->sum = sum_of(*block);
    if (now.event && !now.is_wait) now.event->happened = std::max(now.event->happened, now.number);
    ++stream.num_done;
  }

  // Runs one operation of a random stream, of another one than `last` if it can. Returns whether there was one.
  bool run_any(const CUstream_st* last = nullptr) {
    std::vector<CUstream_st*> ready;
    for (CUstream_st* stream : streams_)
      if (!stream->waiting.empty() && stream->waiting.front().may_run() && stream != last) ready.push_back(stream);
    if (ready.empty()) return last != nullptr && run_any();
    run_first(*ready[draw(ready.size())]);
    return true;
  }

  CUstream_st& stream_that_records(const EventState& event) {
    for (CUstream_st* stream : streams_)
      for (const Operation& one : stream->waiting)
        if (one.event.get() == &event && !one.is_wait) return *stream;
    cuda_on_cpu::fail("an event is awaited that no stream records");
  }

  // Runs one operation that the first one of a stream needs, or that one.
  void run_towards(CUstream_st& stream) {
    CUstream_st* at = &stream;
    for (size_t steps = 0; !at->waiting.front().may_run(); ++steps) {
      const Operation& wait = at->waiting.front();
      CUstream_st* next = nullptr;
      for (CUstream_st* other : streams_)
        for (const Operation& operation : other->waiting)
          if (operation.event == wait.event && operation.number == wait.number && !operation.is_wait) next = other;
      if (next == nullptr || steps > streams_.size()) cuda_on_cpu::fail("streams wait for each other");
      at = next;
    }
    run_first(*at);
  }

  uint64_t random_ = 1;
  std::vector<CUstream_st*> streams_;
  std::map<uintptr_t, Block> blocks_;                                           // by address
  std::map<std::tuple<bool, cudaStream_t, size_t>, std::vector<void*>> again_;  // memory that was given back
};

// A call: alone in the emulator, with its time taken.
class Call {
 public:
  Call() : lock_(Gpu::only().mutex), began_(depth++ == 0 ? thread_ns() : 0) {}
  ~Call() {
    if (--depth == 0) spent_ns += thread_ns() - began_;
  }
  Gpu* operator->() { return &Gpu::only(); }

 private:
  std::lock_guard<std::recursive_mutex> lock_;
  int64_t began_;
};

}  // namespace

namespace cuda_on_cpu {

void fail(const char* what) {
  std::fprintf(stderr, "cuda_on_cpu: %s\n", what);
  std::abort();
}

uint64_t draw(uint64_t n) { return Gpu::only().draw(n); }

void enqueue(cudaStream_t stream, std::function<void()> work, const std::vector<const void*>& uses) {
  Call gpu;
  ++gpu->counts.launches;
  gpu->enqueue(gpu->stream(stream), {std::move(work)}, uses);
}

}  // namespace cuda_on_cpu

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  Call gpu;
  ++gpu->counts.allocations;
  return gpu->allocate(memory, bytes, false);
}

cudaError_t cudaFree(void* memory) {
  if (memory == nullptr) return cudaSuccess;
  Call gpu;
  ++gpu->counts.waits;
  gpu->finish_all();
  gpu->free(memory);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** memory, size_t bytes) {
  Call gpu;
  ++gpu->counts.allocations;
  return gpu->allocate(memory, bytes, true);
}

cudaError_t cudaFreeHost(void* memory) {
  Call gpu;
  gpu->finish_all();
  gpu->free(memory);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned) {
  Call gpu;
  gpu->pin(memory, bytes);
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* memory) {
  Call gpu;
  gpu->finish_all();
  gpu->forget(memory);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  Call gpu;
  const Block *target = gpu->block_of(to), *source = gpu->block_of(from);
  const auto on_gpu = [](const Block* block) { return block != nullptr && !block->is_pinned; };
  if (on_gpu(target) != (kind != cudaMemcpyDeviceToHost) || on_gpu(source) != (kind != cudaMemcpyHostToDevice))
    cuda_on_cpu::fail("a copy is not of the kind that it says");
  if (kind == cudaMemcpyDeviceToDevice) {
    ++gpu->counts.copies_on_gpu;
  } else if (kind == cudaMemcpyHostToDevice) {
    ++gpu->counts.copies_to_gpu;
    gpu->counts.bytes_to_gpu += bytes;
  } else {
    ++gpu->counts.copies_to_host;
    gpu->counts.bytes_to_host += bytes;
  }
  CUstream_st& own = gpu->stream(stream);
  std::vector<const void*> uses{from, to};
  if (source == nullptr) {  // pageable, as is a target without a block
    const auto* values = static_cast<const uint8_t*>(from);
    auto copied = std::make_shared<std::vector<uint8_t>>(values, values + bytes);
    gpu->enqueue(own, {[=] { std::memcpy(to, copied->data(), bytes); }}, {to});
  } else {
    if (target == nullptr) uses.pop_back();
    gpu->enqueue(own, {[=] { std::memcpy(to, from, bytes); }}, uses);
  }
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  Call gpu;
  ++gpu->counts.memsets;
  gpu->enqueue(gpu->stream(stream), {[=] { std::memset(memory, value, bytes); }}, {memory});
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  Call gpu;
  *stream = gpu->make_stream();
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Call gpu;
  gpu->free_stream(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Call gpu;
  ++gpu->counts.waits;
  if (gpu->fault != "wait") gpu->finish(gpu->stream(stream));
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Call gpu;
  ++gpu->counts.stream_waits;
  const std::string kind = stream == gpu->models ? "give" : "take";
  if (gpu->fault != "hand_over" && gpu->fault != kind) gpu->await(gpu->stream(stream), event->state);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st();
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Call gpu;
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Call gpu;
  ++gpu->counts.records;
  gpu->record(gpu->stream(stream), event->state);
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Call gpu;
  ++gpu->counts.waits;
  if (gpu->fault != "wait") gpu->finish(*event->state);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  Call gpu;
  const bool is_late = event->state->happened < event->state->recorded && gpu->fault != "late";
  return is_late ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* num) {
  *num = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int) { return cudaSuccess; }

cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 9;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* about, const void* memory) {
  Call gpu;
  const Block* block = gpu->block_of(memory);
  about->device = 0;
  about->type = block == nullptr   ? cudaMemoryTypeUnregistered
                : block->is_pinned ? cudaMemoryTypeHost
                                   : cudaMemoryTypeDevice;
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : error == cudaErrorNotReady ? "not ready" : "no error";
}

void cuda_on_cpu_seed(uint64_t seed) {
  Call gpu;
  gpu->seed(seed);
}

void cuda_on_cpu_be_lazy() {
  Call gpu;
  gpu->is_lazy = true;
}

void cuda_on_cpu_be_free(uint64_t threads) {
  Call gpu;
  gpu->finish_all();
  cuda_on_cpu::most_threads = threads;
  cuda_on_cpu::is_free = true;
}

void cuda_on_cpu_counts(CudaOnCpuCounts* counts) {
  Call gpu;
  *counts = std::exchange(gpu->counts, {});
}

int64_t cuda_on_cpu_spent() { return spent_ns; }

void* cuda_on_cpu_take(size_t bytes, cudaStream_t stream) {
  Call gpu;
  return gpu->take(bytes, false, stream);
}

void* cuda_on_cpu_take_pinned(size_t bytes) {
  Call gpu;
  return gpu->take(bytes, true, nullptr);
}

void cuda_on_cpu_record(void* memory, cudaStream_t stream) {
  Call gpu;
  Block* block = gpu->block_of(memory);
  if (block != nullptr && block->stream != stream) block->other_streams.push_back(stream);
}

void cuda_on_cpu_give_back(void* memory) {
  Call gpu;
  gpu->give_back(memory);
}

void cuda_on_cpu_read(const void* memory, size_t bytes, cudaStream_t stream) {
  Call gpu;
  if (cuda_on_cpu::is_free) return;
  const auto check = [=, sum = checksum(memory, bytes)] {
    if (checksum(memory, bytes) != sum)
      cuda_on_cpu::fail("memory was written before a stream that reads it had read it");
  };
  gpu->enqueue(gpu->stream(stream), {check});
}

void cuda_on_cpu_write(void* memory, const void* values, size_t bytes, cudaStream_t stream) {
  Call gpu;
  if (cuda_on_cpu::is_free) return;
  const auto* at = static_cast<const uint8_t*>(values);
  auto copied = std::make_shared<std::vector<uint8_t>>(at, at + bytes);
  gpu->enqueue(gpu->stream(stream), {[=] { std::memcpy(memory, copied->data(), bytes); }});
}

void cuda_on_cpu_leave_out(const char* what, cudaStream_t models) {
  Call gpu;
  gpu->fault = what;
  gpu->models = models;
}

void cuda_on_cpu_run_all() {
  Call gpu;
  gpu->finish_all();
}

void cuda_on_cpu_run(cudaStream_t stream) {
  Call gpu;
  gpu->finish(gpu->stream(stream));
}
