// The part of CUDA that cpp/cuda/*.cu use, emulated on the CPU for tests on machines without a GPU: the same source is
// compiled by any C++ compiler with this folder first in the include path. Kernels run one warp after the other. The
// lanes of a warp are fibers that take turns at each collective call; it is an error if lanes make different ones. GPU
// memory is host memory, filled with garbage when it is allocated.
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
#include <vector>

#define __global__
#define __device__
#define __host__

using std::min;

enum cudaError_t { cudaSuccess, cudaErrorMemoryAllocation };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
using cudaStream_t = struct CUstream_st*;

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

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "cuda_on_cpu: %s\n", what);
  std::abort();
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
      for (lane_ = 0; lane_ < kLanes; ++lane_) {
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
  blockDim = config->blockDim;
  if (blockDim.x % cuda_on_cpu::kLanes != 0) cuda_on_cpu::fail("blocks must be of whole warps");
  for (unsigned block = 0; block < config->gridDim.x; ++block)
    for (unsigned warp = 0; warp < blockDim.x / cuda_on_cpu::kLanes; ++warp) {
      blockIdx.x = block;
      cuda_on_cpu::Warp::current().run(warp, [&] { kernel(arguments...); });
    }
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

inline cudaError_t cudaMalloc(void** memory, size_t bytes) {
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (*memory == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*memory, 0xcd, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  if (bytes > 0) std::memset(memory, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaGetDeviceCount(int* num) {
  *num = 1;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 9;
  return cudaSuccess;
}
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
};
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* about, const void*) {
  *about = {cudaMemoryTypeDevice, 0};
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "no error";
}
