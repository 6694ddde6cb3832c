// The part of CUDA that hetmpi uses, emulated on the CPU for tests on machines without a GPU: the same source is
// compiled by any C++ compiler with this folder first in the include path, together with emulator.cpp, which says what
// a call does. Here are kernels: their blocks and warps run in a random order, one after the other. The lanes of a warp
// are fibers that take turns, in a random order, at each collective call; it is an error if lanes make different ones.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __host__

using std::min;

enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation, cudaErrorNotReady };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaHostRegisterDefault = 0 };
using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  void* attrs;
  unsigned numAttrs;
};

inline dim3 blockIdx, blockDim, threadIdx;

namespace cuda_on_cpu {

constexpr int kLanes = 32;
enum Collective { kNone, kBallot, kShuffle, kSync };

// Ends the process: the program under test breaks a rule of CUDA.
[[noreturn]] void fail(const char* what);

inline uint64_t most_threads = UINT64_MAX;  // of a kernel that runs
inline bool is_free = false;                // as of cuda_on_cpu_be_free
// A random number below n > 0.
uint64_t draw(uint64_t n);

// Appends an operation to a stream. uses: the memory that it reads or writes. REQUIRES: `work` makes no call of CUDA.
void enqueue(cudaStream_t stream, std::function<void()> work, const std::vector<const void*>& uses);

// The numbers below n in a random order.
inline std::vector<unsigned> shuffled(unsigned n) {
  std::vector<unsigned> order(n);
  std::iota(order.begin(), order.end(), 0u);
  for (unsigned i = n; i > 1; --i) std::swap(order[i - 1], order[draw(i)]);
  return order;
}

class Warp {
 public:
  static Warp& current() {
    static Warp warp;
    return warp;
  }

  // Runs `thread` on all lanes of one warp of a block.
  void run(unsigned warp, const std::function<void()>& thread) {
    thread_ = &thread;
    std::fill_n(is_live_, kLanes, true);
    for (bool any = true; any;) {
      any = false;
      const int first = static_cast<int>(draw(kLanes)), step = 1 + 2 * static_cast<int>(draw(kLanes / 2));
      for (int turn = 0; turn < kLanes; ++turn) {
        lane_ = (first + turn * step) % kLanes;
        if (!is_live_[lane_]) continue;
        threadIdx.x = warp * kLanes + lane_;
        at_[lane_] = kNone;
        resume();
        any = any || is_live_[lane_];
      }
      for (int lane = 1; any && lane < kLanes; ++lane)
        if (at_[lane] != at_[0] || is_live_[lane] != is_live_[0]) fail("lanes of a warp do not make the same calls");
    }
  }

  // The values of `value` on all lanes.
  template <typename T>
  std::vector<T> gathered(T value, Collective collective) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    std::memcpy(&values_[lane_], &value, sizeof(T));
    wait(collective);
    std::vector<T> all(kLanes);
    for (int lane = 0; lane < kLanes; ++lane) std::memcpy(&all[lane], &values_[lane], sizeof(T));
    wait(collective);  // no lane overwrites values that others still read
    return all;
  }

  void wait(Collective collective) {
    at_[lane_] = collective;
    suspend();
  }

  int lane() const { return lane_; }

 private:
  static constexpr size_t kStack = 256 << 10;

  // A fiber per lane, which runs one thread after the other and never ends. Started fibers are switched by jumps:
  // swapcontext() would make a system call each time.
  Warp() {
    for (int lane = 0; lane < kLanes; ++lane) {
      stacks_[lane].reset(new char[kStack]);
      make_beginning(&beginnings_[lane], stacks_[lane].get());
    }
  }

  static void make_beginning(ucontext_t* context, char* stack) {
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = kStack;
    makecontext(context, &Warp::enter, 0);
  }

  static void enter() {
    for (Warp& warp = current();;) {
      (*warp.thread_)();
      warp.is_live_[warp.lane_] = false;
      warp.suspend();
    }
  }

  // Switches from the scheduler to the next lane, until that waits or ends.
  void resume() {
    if (_setjmp(scheduler_) != 0) return;
    if (has_begun_[lane_]) _longjmp(fibers_[lane_], 1);
    has_begun_[lane_] = true;
    setcontext(&beginnings_[lane_]);
  }

  void suspend() {
    if (_setjmp(fibers_[lane_]) == 0) _longjmp(scheduler_, 1);
  }

  const std::function<void()>* thread_ = nullptr;
  ucontext_t beginnings_[kLanes];
  jmp_buf scheduler_, fibers_[kLanes];
  bool has_begun_[kLanes] = {};
  std::unique_ptr<char[]> stacks_[kLanes];
  Collective at_[kLanes];
  bool is_live_[kLanes];
  uint64_t values_[kLanes];
  int lane_ = 0;
};

}  // namespace cuda_on_cpu

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  if (config->blockDim.x % cuda_on_cpu::kLanes != 0) cuda_on_cpu::fail("blocks must be of whole warps");
  std::vector<const void*> uses;
  const auto note = [&](auto argument) {
    if constexpr (std::is_pointer_v<decltype(argument)>)
      if (argument != nullptr) uses.push_back(argument);
  };
  (note(static_cast<Parameters>(arguments)), ...);
  const auto run = [blocks = config->gridDim.x, block = config->blockDim, kernel, arguments...] {
    if (uint64_t{blocks} * block.x > cuda_on_cpu::most_threads) return;
    blockDim = block;
    const unsigned warps = block.x / cuda_on_cpu::kLanes;
    for (const unsigned warp : cuda_on_cpu::shuffled(blocks * warps)) {
      blockIdx.x = warp / warps;
      cuda_on_cpu::Warp::current().run(warp % warps, [&] { kernel(arguments...); });
    }
  };
  cuda_on_cpu::enqueue(config->stream, run, uses);
  return cudaSuccess;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline void __syncwarp() { cuda_on_cpu::Warp::current().wait(cuda_on_cpu::kSync); }

inline unsigned __ballot_sync(unsigned, bool is_so) {
  const auto all = cuda_on_cpu::Warp::current().gathered(static_cast<uint8_t>(is_so), cuda_on_cpu::kBallot);
  unsigned bits = 0;
  for (int lane = 0; lane < cuda_on_cpu::kLanes; ++lane) bits |= static_cast<unsigned>(all[lane]) << lane;
  return bits;
}

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return cuda_on_cpu::Warp::current().gathered(value, cuda_on_cpu::kShuffle)[lane];
}

template <typename T>
T __shfl_down_sync(unsigned, T value, int by) {
  const int lane = cuda_on_cpu::Warp::current().lane() + by;
  const auto all = cuda_on_cpu::Warp::current().gathered(value, cuda_on_cpu::kShuffle);
  return lane < cuda_on_cpu::kLanes ? all[lane] : value;
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int bits) {
  const int lane = cuda_on_cpu::Warp::current().lane() ^ bits;
  return cuda_on_cpu::Warp::current().gathered(value, cuda_on_cpu::kShuffle)[lane];
}

template <typename T>
T atomicAdd(T* place, T value) {
  const T before = *place;
  *place += value;
  return before;
}

struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
};

#define CUDA_ON_CPU extern "C" __attribute__((visibility("default")))

CUDA_ON_CPU cudaError_t cudaMalloc(void** memory, size_t bytes);
CUDA_ON_CPU cudaError_t cudaFree(void* memory);
CUDA_ON_CPU cudaError_t cudaMallocHost(void** memory, size_t bytes);
CUDA_ON_CPU cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned flags);
CUDA_ON_CPU cudaError_t cudaHostUnregister(void* memory);
CUDA_ON_CPU cudaError_t cudaFreeHost(void* memory);
CUDA_ON_CPU cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t);
CUDA_ON_CPU cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t);
CUDA_ON_CPU cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned flags);
CUDA_ON_CPU cudaError_t cudaStreamCreateWithPriority(cudaStream_t*, unsigned flags, int priority);
CUDA_ON_CPU cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
CUDA_ON_CPU cudaError_t cudaStreamDestroy(cudaStream_t);
CUDA_ON_CPU cudaError_t cudaStreamSynchronize(cudaStream_t);
CUDA_ON_CPU cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned flags);
CUDA_ON_CPU cudaError_t cudaEventCreateWithFlags(cudaEvent_t*, unsigned flags);
CUDA_ON_CPU cudaError_t cudaEventDestroy(cudaEvent_t);
CUDA_ON_CPU cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t);
CUDA_ON_CPU cudaError_t cudaEventSynchronize(cudaEvent_t);
CUDA_ON_CPU cudaError_t cudaEventQuery(cudaEvent_t);
CUDA_ON_CPU cudaError_t cudaGetDeviceCount(int* num);
CUDA_ON_CPU cudaError_t cudaGetDevice(int* device);
CUDA_ON_CPU cudaError_t cudaSetDevice(int device);
CUDA_ON_CPU cudaError_t cudaGetLastError();
CUDA_ON_CPU cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device);
CUDA_ON_CPU cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* about, const void* memory);
CUDA_ON_CPU const char* cudaGetErrorString(cudaError_t error);

// What CUDA has not.

struct CudaOnCpuCounts {
  int64_t launches, waits, stream_waits, records, allocations, memsets;
  int64_t copies_to_gpu, bytes_to_gpu, copies_to_host, bytes_to_host, copies_on_gpu;
};
// Order of the operations that follow. Default: 1.
CUDA_ON_CPU void cuda_on_cpu_seed(uint64_t seed);
// From now on nothing runs but what is waited for, and what that needs.
CUDA_ON_CPU void cuda_on_cpu_be_lazy();
// From now on kernels of more threads do nothing, and memory is neither checked nor filled with garbage: what kernels
// tell the host is what earlier ones told, and the processor's caches are the program's, whose time can be measured.
CUDA_ON_CPU void cuda_on_cpu_be_free(uint64_t threads);
// Since the last call.
CUDA_ON_CPU void cuda_on_cpu_counts(CudaOnCpuCounts* counts);
// Nanoseconds of processor time that this thread has spent in the emulator.
CUDA_ON_CPU int64_t cuda_on_cpu_spent();
// Memory as of torch's allocators. What is given back is filled with garbage and taken again; of a stream, once the
// streams that were recorded for it have done what they were given before; of the host, which stays pinned, at once.
CUDA_ON_CPU void* cuda_on_cpu_take(size_t bytes, cudaStream_t);
CUDA_ON_CPU void* cuda_on_cpu_take_pinned(size_t bytes);
CUDA_ON_CPU void cuda_on_cpu_record(void* memory, cudaStream_t);
CUDA_ON_CPU void cuda_on_cpu_give_back(void* memory);
// A read of GPU memory by the stream: fails if the values are not those of now.
CUDA_ON_CPU void cuda_on_cpu_read(const void* memory, size_t bytes, cudaStream_t);
// A write of GPU memory by the stream, of the values of now.
CUDA_ON_CPU void cuda_on_cpu_write(void* memory, const void* values, size_t bytes, cudaStream_t);
// From now on leaves out calls, as a fault to be found: "wait", those for which the host waits; "hand_over", waits of
// streams; "give", those of `models`; "take", those of others; "late": events seem to have happened.
CUDA_ON_CPU void cuda_on_cpu_leave_out(const char* what, cudaStream_t models);
// What has been enqueued to the stream is done. Not counted as a wait.
CUDA_ON_CPU void cuda_on_cpu_run(cudaStream_t);
CUDA_ON_CPU void cuda_on_cpu_run_all();
