// Memory and launches on a GPU, with errors as exceptions. Included by .cu files alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace hetmpi {

// Throws std::runtime_error with the call, its file and line, and CUDA's own words.
inline void check_cuda(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + call + ": " + cudaGetErrorString(error));
}
#define HETMPI_CUDA(call) ::hetmpi::check_cuda((call), #call, __FILE__, __LINE__)

constexpr int kBlock = 256;  // threads of a block
constexpr int kWarp = 32;

// Runs `kernel` on at least `threads` threads of a stream; nothing if they are none.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t threads, cudaStream_t stream, Arguments... arguments) {
  if (threads == 0) return;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>((threads + kBlock - 1) / kBlock));
  config.blockDim = dim3(kBlock);
  config.stream = stream;
  HETMPI_CUDA(cudaLaunchKernelEx(&config, kernel, arguments...));
}

// An array in the GPU's memory. What is resized or freed is no longer used by the stream given then, or by any that waits
// for it.
template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() {
    if (data_ != nullptr) cudaFree(data_);  // waits for all streams; an error is a former one's
  }

  T* data() const { return data_; }
  int64_t size() const { return size_; }

  // Makes room for n numbers and keeps those that are there.
  void resize(int64_t n, cudaStream_t stream) {
    if (n > room_) {
      const int64_t room = n + room_ / 2;
      T* grown;
      HETMPI_CUDA(cudaMalloc(reinterpret_cast<void**>(&grown), room * sizeof(T)));
      if (size_ > 0) HETMPI_CUDA(cudaMemcpyAsync(grown, data_, size_ * sizeof(T), cudaMemcpyDeviceToDevice, stream));
      HETMPI_CUDA(cudaStreamSynchronize(stream));
      if (data_ != nullptr) HETMPI_CUDA(cudaFree(data_));
      data_ = grown;
      room_ = room;
    }
    size_ = n;
  }

  // Every byte 0.
  void clear(cudaStream_t stream) {
    if (size_ > 0) HETMPI_CUDA(cudaMemsetAsync(data_, 0, size_ * sizeof(T), stream));
  }

 private:
  T* data_ = nullptr;
  int64_t room_ = 0, size_ = 0;
};

}  // namespace hetmpi
