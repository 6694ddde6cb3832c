// Runs begin at each multiple of kRun places from the first of their row, so that at most one run that is not the first
// of its row begins in each window of kRun places: the window's number is that of the run's sum in `later`.
#include "cuda/row_sums.h"

#include <algorithm>
#include <cub/cub.cuh>
#include <type_traits>

#include "cuda/device.h"

namespace hetmpi {
namespace {

constexpr int64_t kAlignment = 256;  // of memory for CUB

__global__ void number_kernel(int32_t* places, int64_t n) {
  const int64_t i = thread_number();
  if (i < n) places[i] = static_cast<int32_t>(i);
}

// sorted (n): the rows.
__global__ void order_kernel(const int64_t* sorted, int64_t n, RowOrder order) {
  const int64_t i = thread_number();
  if (i >= n) return;
  const bool is_first = i == 0 || sorted[i - 1] != sorted[i], is_last = i + 1 == n || sorted[i + 1] != sorted[i];
  order.set(i, static_cast<int32_t>(sorted[i]), is_first, is_last);
}

// The values of a batch, given in parts.
template <typename T>
struct Values {
  const T* at;
  uint32_t of_part;  // values of a part
  int64_t stride, width;

  __device__ const T* of(int32_t place) const {
    const auto i = static_cast<uint32_t>(place);
    return at + i / of_part * stride + i % of_part * width;
  }
};

struct Run {
  int32_t row, number, begin, end;  // number in the row
};

// The run that begins in a window and is not its row's first; none: begin == end.
__device__ Run run_in(const RowOrder& order, int64_t window) {
  const int32_t row = order.windows[window];
  const RowOrder::Range range = order.ranges[row];
  const int64_t number = (window * kRun - range.begin + kRun - 1) / kRun, begin = range.begin + number * kRun;
  if (number == 0 || begin >= range.end) return {row, 0, 0, 0};
  return {row, static_cast<int32_t>(number), static_cast<int32_t>(begin),
          static_cast<int32_t>(begin + kRun < range.end ? begin + kRun : range.end)};
}

// sum + load(0) + load(1) + ... + load(n - 1), one after the other; several loads overlap.
template <typename T, typename Load>
__device__ T added(T sum, int64_t n, Load load) {
  constexpr int kAtOnce = 8;
  T some[kAtOnce];
  int64_t i = 0;
  for (; i + kAtOnce <= n; i += kAtOnce) {
    for (int k = 0; k < kAtOnce; ++k) some[k] = load(i + k);
    for (int k = 0; k < kAtOnce; ++k) sum = plus(sum, some[k]);
  }
  for (; i < n; ++i) sum = plus(sum, load(i));
  return sum;
}

// kTile lanes for the first run of each row, then for those that begin in each window.
template <int kTile, typename T>
__global__ void sum_runs_kernel(Values<T> values, RowOrder order, int64_t num_rows, int64_t num_windows, T* later,
                                T* sums) {
  const int64_t i = thread_number() / kTile;
  if (i >= num_rows + num_windows) return;
  Run run;
  T* to = sums + i * values.width;
  if (i < num_rows) {
    const RowOrder::Range range = order.ranges[i];
    run = {0, 0, range.begin, range.begin + kRun < range.end ? static_cast<int32_t>(range.begin + kRun) : range.end};
  } else {
    run = run_in(order, i - num_rows);
    if (run.begin == run.end) return;
    to = later + (i - num_rows) * values.width;
  }
  const int32_t* places = order.places + run.begin;
  for (int64_t c = threadIdx.x % kTile; c < values.width; c += kTile)
    to[c] = added(T(), run.end - run.begin, [=](int64_t i) { return values.of(places[i])[c]; });
}

// kTile lanes per row with several runs.
template <int kTile, typename T>
__global__ void add_runs_kernel(RowOrder order, int64_t num_windows, int64_t width, const T* later, T* sums) {
  const int64_t window = thread_number() / kTile;
  if (window >= num_windows) return;
  const Run run = run_in(order, window);
  if (run.number != 1) return;  // none begins here, or it is not its row's second
  const int64_t num = (order.ranges[run.row].end - run.begin + kRun - 1) / kRun;
  T* sum = sums + run.row * width;
  for (int64_t c = threadIdx.x % kTile; c < width; c += kTile)
    sum[c] = added(sum[c], num, [=](int64_t k) { return later[(window + k) * width + c]; });
}

template <typename T>
void sum_runs(const Values<T>& values, const RowOrder& order, int64_t num_rows, int64_t num_windows, T* later, T* sums,
              cudaStream_t stream) {
  with_tile(values.width, [&](auto tile) {
    launch(sum_runs_kernel<tile(), T>, (num_rows + num_windows) * tile(), stream, values, order, num_rows, num_windows,
           later, sums);
    launch(add_runs_kernel<tile(), T>, num_windows * tile(), stream, order, num_windows, values.width,
           static_cast<const T*>(later), sums);
  });
}

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

void sort_places(const int64_t* values, int64_t n, int bits, int64_t* sorted, int32_t* places, int32_t* unsorted,
                 void* memory, size_t& num_bytes, Stream stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (memory != nullptr) launch(number_kernel, n, s, unsorted, n);
  HETMPI_CHECK(cub::DeviceRadixSort::SortPairs(memory, num_bytes, values, sorted, unsorted, places, static_cast<int>(n),
                                               0, bits, s));
}

int64_t scratch_bytes(int64_t n, int64_t num_rows, int device) {
  check_length(n);
  check_length(num_rows);
  const OnDevice here(device);
  size_t bytes = 0;
  sort_places(nullptr, n, bits_of(num_rows - 1), nullptr, nullptr, nullptr, nullptr, bytes, nullptr);
  return aligned(bytes) + n * (sizeof(int64_t) + sizeof(int32_t));
}

void order_rows(const int64_t* rows, int64_t n, int64_t num_rows, const RowOrder& order, void* memory, int device,
                Stream stream) {
  const OnDevice here(device);
  const auto s = static_cast<cudaStream_t>(stream);
  HETMPI_CHECK(cudaMemsetAsync(order.ranges, 0, num_rows * sizeof(RowOrder::Range), s));  // of rows without occurrences
  if (n == 0) return;
  size_t bytes = 0;
  sort_places(rows, n, bits_of(num_rows - 1), nullptr, nullptr, nullptr, nullptr, bytes, stream);
  auto* sorted = reinterpret_cast<int64_t*>(static_cast<char*>(memory) + aligned(bytes));
  auto* unsorted = reinterpret_cast<int32_t*>(sorted + n);
  sort_places(rows, n, bits_of(num_rows - 1), sorted, order.places, unsorted, memory, bytes, stream);
  launch(order_kernel, n, s, sorted, n, order);
}

void sum_by_row_on_gpu(const float* values, int64_t num_parts, int64_t m, int64_t stride, const RowOrder& order,
                       int64_t num_rows, int64_t dim, float* later, float* sums, int device, Stream stream) {
  const OnDevice here(device);
  const auto s = static_cast<cudaStream_t>(stream);
  const int64_t num_windows = RowOrder::num_windows(num_parts * m);
  const auto of_part = static_cast<uint32_t>(std::max<int64_t>(m, 1));
  const bool has_quads =
      dim % 4 == 0 && stride % 4 == 0 && is_quad_aligned(values) && is_quad_aligned(sums) && is_quad_aligned(later);
  if (has_quads)
    sum_runs(Values<float4>{reinterpret_cast<const float4*>(values), of_part, stride / 4, dim / 4}, order, num_rows,
             num_windows, reinterpret_cast<float4*>(later), reinterpret_cast<float4*>(sums), s);
  else
    sum_runs(Values<float>{values, of_part, stride, dim}, order, num_rows, num_windows, later, sums, s);
}

}  // namespace hetmpi
