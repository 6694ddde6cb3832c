// Random rows of 512 bytes, and clocks of 4, by a kernel: in GPU memory, and in host memory that is registered with the
// GPU. Decides whether kernels should read and write the owners' shards where they lie.
//
//     nvcc -O3 -arch=native bench/zero_copy.cu -o zero_copy && ./zero_copy
#include <cuda_runtime.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

constexpr long kRows = 4 << 20;  // 2 GiB of rows of dim 128
constexpr long kMost = 1 << 18;  // rows of a call
constexpr int kLanes = 32;       // threads of a row, 16 bytes each
constexpr int kTurns = 20;

enum class Work { kRead, kUpdate, kClocks };

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

__device__ long row_of(long i) {  // by splitmix64
  uint64_t x = i * 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return (x ^ (x >> 31)) % kRows;
}

__global__ void read_rows(const float4* rows, float4* out, long n, long first) {
  const long i = (blockIdx.x * (long)blockDim.x + threadIdx.x) / kLanes, lane = threadIdx.x % kLanes;
  if (i < n) out[i * kLanes + lane] = rows[row_of(first + i) * kLanes + lane];
}

__global__ void update_rows(float4* rows, const float4* gradients, long n, long first) {
  const long i = (blockIdx.x * (long)blockDim.x + threadIdx.x) / kLanes, lane = threadIdx.x % kLanes;
  if (i >= n) return;
  float4* row = rows + row_of(first + i) * kLanes + lane;
  const float4 a = *row, g = gradients[i * kLanes + lane];
  *row = {a.x - g.x, a.y - g.y, a.z - g.z, a.w - g.w};
}

__global__ void read_clocks(const int* clocks, int* out, long n, long first) {
  const long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
  if (i < n) out[i] = clocks[row_of(first + i)];
}

struct Timer {
  cudaEvent_t begin, end;
  Timer() { cudaEventCreate(&begin), cudaEventCreate(&end); }
  template <typename F>
  float us(F call) {
    cudaEventRecord(begin);
    call();
    cudaEventRecord(end);
    check(cudaEventSynchronize(end), "call");
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    return 1000 * ms;
  }
};

void launch(Work work, float4* rows, float4* buffer, long n, long first) {
  const long threads = work == Work::kClocks ? n : n * kLanes;
  const long blocks = (threads + 255) / 256;
  if (work == Work::kRead) read_rows<<<blocks, 256>>>(rows, buffer, n, first);
  if (work == Work::kUpdate) update_rows<<<blocks, 256>>>(rows, buffer, n, first);
  if (work == Work::kClocks) read_clocks<<<blocks, 256>>>((int*)rows, (int*)buffer, n, first);
}

int main() {
  const size_t bytes = kRows * kLanes * sizeof(float4);
  float4 *on_gpu, *buffer;
  check(cudaMalloc(&on_gpu, bytes), "cudaMalloc");
  check(cudaMalloc(&buffer, kMost * kLanes * sizeof(float4)), "cudaMalloc");
  check(cudaMemset(on_gpu, 0, bytes), "cudaMemset");
  check(cudaMemset(buffer, 0, kMost * kLanes * sizeof(float4)), "cudaMemset");
  void* shared = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return std::perror("mmap"), 1;
  Timer timer;
  const unsigned flags = cudaHostRegisterMapped | cudaHostRegisterPortable;
  const float us = timer.us([&] { check(cudaHostRegister(shared, bytes, flags), "cudaHostRegister"); });
  std::printf("registering 2 GiB of shared memory: %.0f ms\n", us / 1000);
  for (long n : {1000L, 60000L, 200000L}) {
    for (float4* rows : {on_gpu, (float4*)shared}) {
      for (Work work : {Work::kRead, Work::kUpdate, Work::kClocks}) {
        float best = 1e9f;
        for (int turn = 0; turn < kTurns; ++turn) {
          best = std::min(best, timer.us([&] { launch(work, rows, buffer, n, turn * n); }));
        }
        const char* names[] = {"read 512 B", "update 512 B", "read 4 B"};
        std::printf("%7ld rows, %-4s %-13s %7.1f us\n", n, rows == on_gpu ? "GPU," : "host,", names[(int)work], best);
      }
    }
  }
}
