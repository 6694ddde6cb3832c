// A stable sort makes equal ids adjacent, so that the first of each run is the one that appears first in the batch.
#include "cuda/cuda_unique.h"

#include <cub/cub.cuh>

#include "cuda/device.h"
#include "cuda/row_sums.h"

namespace hetmpi {
namespace {

// begins (n): 1 at the first element of a run of equal ids, in sorted order. is_first (n): 1 at the position of the
// first appearance of an id.
__global__ void begin_kernel(const int64_t* sorted, const int32_t* positions, int64_t n, int32_t* begins,
                             int32_t* is_first) {
  const int64_t i = thread_number();
  if (i >= n) return;
  const bool begins_run = i == 0 || sorted[i - 1] != sorted[i];
  begins[i] = begins_run;
  is_first[positions[i]] = begins_run;
}

// firsts: position of the first appearance of each run's id. runs (n): number of runs up to and including this element.
__global__ void first_kernel(const int32_t* positions, const int32_t* begins, const int32_t* runs, int64_t n,
                             int32_t* firsts) {
  const int64_t i = thread_number();
  if (i < n && begins[i]) firsts[runs[i] - 1] = positions[i];
}

// before (n): number of ids whose first appearance is before this position.
__global__ void write_kernel(const int64_t* sorted, const int32_t* begins, const int32_t* runs, const int32_t* firsts,
                             const int32_t* before, int64_t n, int64_t* keys, int64_t* index, RowOrder order) {
  const int64_t i = thread_number();
  if (i >= n) return;
  const int32_t number = before[firsts[runs[i] - 1]];
  index[order.places[i]] = number;
  if (begins[i]) keys[number] = sorted[i];
  order.set(i, number, begins[i], i + 1 == n || begins[i + 1]);
}

}  // namespace

struct CudaUnique::Memory {
  int device;
  DeviceArray<int64_t> sorted;
  DeviceArray<int32_t> unsorted, begins, runs, is_first, before, firsts;
  DeviceArray<uint8_t> scratch;

  explicit Memory(int device) : device(device) {}
};

CudaUnique::CudaUnique(int device) : memory_(std::make_unique<Memory>(device)) { const OnDevice here(device); }
CudaUnique::~CudaUnique() = default;

int64_t CudaUnique::unique(const int64_t* ids, int64_t n, int64_t limit, int64_t* keys, int64_t* index,
                           int32_t* of_order, Stream stream) {
  check_length(n);
  if (n == 0) return 0;
  Memory& m = *memory_;
  const OnDevice here(m.device);
  const auto s = static_cast<cudaStream_t>(stream);
  const RowOrder order(of_order, n);
  const int num = static_cast<int>(n);
  m.sorted.make_room(n, 0, s);
  for (auto* array : {&m.unsorted, &m.begins, &m.runs, &m.is_first, &m.before, &m.firsts}) array->make_room(n, 0, s);
  with_scratch(m.scratch, s, [&](void* memory, size_t& bytes) {
    sort_places(ids, n, bits_of(limit - 1), m.sorted.data(), order.places, m.unsorted.data(), memory, bytes, stream);
    return cudaSuccess;
  });
  launch(begin_kernel, n, s, m.sorted.data(), order.places, n, m.begins.data(), m.is_first.data());
  with_scratch(m.scratch, s, [&](void* memory, size_t& bytes) {
    return cub::DeviceScan::InclusiveSum(memory, bytes, m.begins.data(), m.runs.data(), num, s);
  });
  with_scratch(m.scratch, s, [&](void* memory, size_t& bytes) {
    return cub::DeviceScan::ExclusiveSum(memory, bytes, m.is_first.data(), m.before.data(), num, s);
  });
  launch(first_kernel, n, s, order.places, m.begins.data(), m.runs.data(), n, m.firsts.data());
  launch(write_kernel, n, s, m.sorted.data(), m.begins.data(), m.runs.data(), m.firsts.data(), m.before.data(), n, keys,
         index, order);
  return to_host(m.runs.data() + n - 1, s);
}

}  // namespace hetmpi
