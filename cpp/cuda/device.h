// Memory and launches on a GPU, and calls of CUB, with errors as exceptions. Included only by .cu files.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace hetmpi {

// Throws std::runtime_error with the call, its file and line, and CUDA's message.
inline void check_cuda(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, which the next launch would report again
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + call + ": " +
                           cudaGetErrorString(error));
}
#define HETMPI_CHECK(call) ::hetmpi::check_cuda((call), #call, __FILE__, __LINE__)

constexpr int kBlock = 256;  // threads of a block
constexpr int kWarp = 32;

// Runs `kernel` on at least `threads` threads of a stream; no launch if `threads` is 0.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t threads, cudaStream_t stream, Arguments... arguments) {
  if (threads == 0) return;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((threads + kBlock - 1) / kBlock));
  config.blockDim = dim3(kBlock);
  config.stream = stream;
  HETMPI_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
}

__device__ inline int64_t thread_number() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

__device__ inline int64_t warp_number() { return thread_number() / kWarp; }
__device__ inline int lane_number() { return threadIdx.x % kWarp; }

constexpr unsigned kAll = 0xffffffffu;  // lanes of a warp

// Iteration of a warp over the numbers of a row (owner/row_optimizer.h, Serially). REQUIRES: all lanes make the same
// calls.
struct Together {
  int lane;

  template <typename Work>
  __device__ void each(int64_t n, Work work) const {
    for (int64_t d = lane; d < n; d += kWarp) work(d);
  }

  // place: all lanes have finished reading it.
  __device__ void set(float* place, float value) const {
    __syncwarp();
    if (lane == 0) *place = value;
  }

  template <typename Value>
  __device__ float sum(int64_t n, Value value) const {
    float part = 0;
    for (int64_t d = lane; d < n; d += kWarp) part += value(d);
    for (int half = kWarp / 2; half > 0; half /= 2) part += __shfl_down_sync(kAll, part, half);
    return __shfl_sync(kAll, part, 0);
  }
};

__device__ inline float plus(float a, float b) { return a + b; }
__device__ inline float4 plus(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// Calls call(std::integral_constant<int, kTile>) with the number of lanes for a row of `num` values, 4 to
// 32.
template <typename Call>
void with_tile(int64_t num, Call call) {
  if (num > 16) return call(std::integral_constant<int, 32>());
  if (num > 8) return call(std::integral_constant<int, 16>());
  if (num > 4) return call(std::integral_constant<int, 8>());
  call(std::integral_constant<int, 4>());
}

inline bool is_quad_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % sizeof(float4) == 0; }

// Makes a GPU the current device of this thread during its lifetime.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    HETMPI_CHECK(cudaGetDevice(&before_));
    HETMPI_CHECK(cudaSetDevice(device));
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { cudaSetDevice(before_); }

 private:
  int before_;
};

// Growable array in the memory of the GPU that is current at construction. Replaced memory is no longer used by the
// given stream, or by streams that wait for it.
template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { free(data_); }

  T* data() const { return data_; }

  // Makes room for n numbers and keeps the first `kept`. No effect if memory is short.
  void make_room(int64_t n, int64_t kept, cudaStream_t stream) {
    if (n <= room_) return;
    const int64_t room = n + room_ / 2;
    T* grown;
    HETMPI_CHECK(cudaMalloc(reinterpret_cast<void**>(&grown), room * sizeof(T)));
    cudaError_t error =
        kept == 0 ? cudaSuccess : cudaMemcpyAsync(grown, data_, kept * sizeof(T), cudaMemcpyDeviceToDevice, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    free(error == cudaSuccess ? data_ : grown);
    HETMPI_CHECK(error);
    data_ = grown;
    room_ = room;
  }

  // The first n numbers, set to 0.
  void clear(int64_t n, cudaStream_t stream) {
    if (n > 0) HETMPI_CHECK(cudaMemsetAsync(data_, 0, n * sizeof(T), stream));
  }

 private:
  static void free(T* data) {
    if (data != nullptr && cudaFree(data) != cudaSuccess) cudaGetLastError();  // clears an error of an earlier call
  }

  T* data_ = nullptr;
  int64_t room_ = 0;
};

// Growable array in pinned host memory, which kernels and copies use in place.
template <typename T>
class PinnedArray {
 public:
  PinnedArray() = default;
  PinnedArray(const PinnedArray&) = delete;
  PinnedArray& operator=(const PinnedArray&) = delete;
  ~PinnedArray() { free(); }

  T* data() const { return data_; }

  // Makes room for n numbers, and keeps none. REQUIRES: the GPU does not use them.
  void make_room(int64_t n) {
    if (n <= room_) return;
    free();
    HETMPI_CHECK(cudaMallocHost(reinterpret_cast<void**>(&data_), (n + n / 2) * sizeof(T)));
    room_ = n + n / 2;
  }

 private:
  void free() {
    if (data_ != nullptr && cudaFreeHost(data_) != cudaSuccess) cudaGetLastError();
    data_ = nullptr;
    room_ = 0;
  }

  T* data_ = nullptr;
  int64_t room_ = 0;
};

// Reads the number at `device` after all earlier work of the stream.
template <typename T>
T to_host(const T* device, cudaStream_t stream) {
  T value;
  HETMPI_CHECK(cudaMemcpyAsync(&value, device, sizeof(T), cudaMemcpyDeviceToHost, stream));
  HETMPI_CHECK(cudaStreamSynchronize(stream));
  return value;
}

// Two-phase calls of CUB: call(memory, bytes) first computes the bytes it needs, then runs with memory from `scratch`.
template <typename Call>
void with_scratch(DeviceArray<uint8_t>& scratch, cudaStream_t stream, Call call) {
  size_t bytes = 0;
  HETMPI_CHECK(call(nullptr, bytes));
  scratch.make_room(static_cast<int64_t>(bytes < 1 ? 1 : bytes), 0, stream);
  HETMPI_CHECK(call(scratch.data(), bytes));
}

// n as CUB's type of sizes. Throws std::invalid_argument.
inline void check_length(int64_t n) {
  if (n < 0 || n >= int64_t{1} << 31)
    throw std::invalid_argument("a call takes up to 2^31 - 1 entries, got " + std::to_string(n));
}

// Number of bits of numbers up to `largest`.
inline int bits_of(int64_t largest) {
  int bits = 1;
  while (bits < 64 && largest >> bits != 0) ++bits;
  return bits;
}

}  // namespace hetmpi
