#include "cuda/gpu_rows.h"

#include <cstring>
#include <stdexcept>

#include "cuda/device.h"
#include "cuda/events.h"

namespace hetmpi {
namespace {

cudaStream_t on(Stream stream) { return static_cast<cudaStream_t>(stream); }

// kTile lanes per row of `width` values.
template <int kTile, typename T>
__global__ void read_kernel(Partition partition, const T* weight, int64_t width, const int64_t* keys, int64_t n,
                            T* out) {
  const int64_t i = thread_number() / kTile;
  if (i >= n) return;
  const T* from = weight + partition.locate(keys[i]).row * width;
  for (int64_t c = threadIdx.x % kTile; c < width; c += kTile) out[i * width + c] = from[c];
}

template <typename T>
void read_rows(const Partition& partition, const T* weight, int64_t width, const int64_t* keys, int64_t n, T* out,
               cudaStream_t stream) {
  with_tile(width, [&](auto tile) {
    launch(read_kernel<tile(), T>, n * tile(), stream, partition, weight, width, keys, n, out);
  });
}

// is_bad: set to 1 if a number is NaN or infinite; 0 before.
__global__ void check_kernel(const float* values, int64_t n, int32_t* is_bad) {
  const int64_t i = thread_number();
  if (i >= n) return;
  uint32_t bits;
  memcpy(&bits, values + i, sizeof bits);
  if ((bits & 0x7f800000u) == 0x7f800000u) *is_bad = 1;  // as is_finite() (vectors.h)
}

// A warp per key. Does nothing if a gradient is bad.
__global__ void apply_kernel(Partition partition, float* weight, float* state, int32_t* clock, uint8_t* touched,
                             int64_t state_dim, RowOptimizer rule, const int64_t* keys, const float* grads, int64_t n,
                             const int32_t* is_bad) {
  const int64_t i = warp_number();
  if (i >= n || *is_bad != 0) return;
  const Together loop{lane_number()};
  const int64_t row = partition.locate(keys[i]).row, dim = rule.dim();
  rule.apply(weight + row * dim, state + row * state_dim, grads + i * dim, loop);
  if (loop.lane != 0) return;
  touched[row] = 1;
  clock[row] += 1;
}

}  // namespace

struct GpuRows::Memory {
  StreamEvents events;
  DeviceArray<int32_t> is_bad;
  PinnedArray<int32_t> was_bad;  // of the last step

  explicit Memory(int device) : events(device) {
    is_bad.make_room(1, 0, nullptr);
    was_bad.make_room(1);
  }
};

GpuRows::GpuRows(const Partition& partition, Arrays arrays, int64_t dim, int64_t state_dim, int device, Model model)
    : partition_(partition),
      arrays_(arrays),
      dim_(dim),
      state_dim_(state_dim),
      device_(device),
      model_(std::move(model)),
      stream_(model_.stream()) {
  const OnDevice here(device);
  memory_ = std::make_unique<Memory>(device);
}

GpuRows::~GpuRows() {
  try {
    memory_->events.wait();  // kernels use what it keeps
  } catch (const std::exception&) {
  }
}

ModelRows GpuRows::read(const KeysOfCall& keys) {
  const OnDevice here(device_);
  memory_->events.collect();
  const ModelRows rows = model_.rows(keys->size());
  const Stream stream = enter();
  read(*keys, rows.at, stream);
  memory_->events.keep(keys);
  memory_->events.record(on(stream));
  return rows;
}

void GpuRows::apply(const KeysOfCall& keys, const ModelRows& grads, const RowOptimizer& rule) {
  const OnDevice here(device_);
  const int64_t n = keys->size();
  const cudaStream_t stream = on(enter());
  Memory& m = *memory_;
  m.is_bad.clear(1, stream);
  launch(check_kernel, n * dim_, stream, grads.at, n * dim_, m.is_bad.data());
  launch(apply_kernel, n * kWarp, stream, partition_, arrays_.weight, arrays_.state, arrays_.clock, arrays_.touched,
         state_dim_, rule, keys->array.data(), grads.at, n, m.is_bad.data());
  HETMPI_CHECK(cudaMemcpyAsync(m.was_bad.data(), m.is_bad.data(), sizeof(int32_t), cudaMemcpyDeviceToHost, stream));
  m.events.keep(keys);
  m.events.record(stream);
  last_ = {keys, grads};
}

void GpuRows::check() {
  if (!last_.first) return;
  memory_->events.wait();
  const auto [keys, grads] = std::exchange(last_, {});
  if (*memory_->was_bad.data() == 0) return;
  model_.refuse(*keys, grads);
  throw std::runtime_error("gradients of the last step were NaN or infinite, and have changed since");
}

void GpuRows::copy(const Keys& keys, float* out) {
  if (keys.size() == 0) return;
  const OnDevice here(device_);
  const ModelRows rows = model_.rows(keys.size());
  const cudaStream_t stream = on(enter());
  read(keys, rows.at, stream);
  HETMPI_CHECK(cudaMemcpyAsync(out, rows.at, keys.size() * dim_ * sizeof(float), cudaMemcpyDeviceToHost, stream));
  HETMPI_CHECK(cudaStreamSynchronize(stream));
}

Stream GpuRows::enter() {
  const Stream stream = model_.stream();
  if (stream != stream_) memory_->events.hand_over(on(stream_), on(stream), true);
  return stream_ = stream;
}

void GpuRows::read(const Keys& keys, float* out, Stream stream) const {
  const int64_t n = keys.size();
  if (dim_ % 4 == 0 && is_quad_aligned(arrays_.weight) && is_quad_aligned(out))
    read_rows(partition_, reinterpret_cast<const float4*>(arrays_.weight), dim_ / 4, keys.array.data(), n,
              reinterpret_cast<float4*>(out), on(stream));
  else
    read_rows<float>(partition_, arrays_.weight, dim_, keys.array.data(), n, out, on(stream));
}

}  // namespace hetmpi
