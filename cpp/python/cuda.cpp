// GpuLines, and what makes batches on a GPU. Arrays in GPU memory are addresses, CUDA streams integers, as torch gives
// them.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cache/cache_decisions.h"
#include "cache/row_type.h"
#include "cuda/cuda_cache.h"
#include "cuda/cuda_unique.h"
#include "cuda/gpu_lines.h"
#include "cuda/gpu_rows.h"
#include "cuda/row_sums.h"
#include "owner/row_optimizer.h"
#include "python/arrays.h"
#include "python/bindings.h"

namespace hetmpi {
namespace {

using Address = uintptr_t;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// gpu: a Gpu (hetmpi/gpu.py). The functions below keep it.
using Gpu = std::shared_ptr<py::object>;

// Memory for n rows, by this method of it.
std::function<ModelRows(int64_t n)> rows_by(const Gpu& gpu, const char* method, int64_t dim) {
  return [gpu, method, dim](int64_t n) {
    const py::gil_scoped_acquire acquire;
    return device_rows_of(gpu->attr(method)(n, dim), n);
  };
}

std::function<Stream()> torchs_stream_of(const Gpu& gpu) {
  return [gpu] {
    const py::gil_scoped_acquire acquire;
    return at<void>(gpu->attr("torchs_stream").cast<Address>());
  };
}

GpuLines::Model model_on(const py::object& gpu, int64_t dim) {
  const Gpu held = kept(gpu);
  return {rows_by(held, "rows", dim), torchs_stream_of(held), [](const ReleasedSums& sums) {
            const auto n = static_cast<int64_t>(sums.keys.size());
            if (n > 0) refuse_if_not_finite(sums.keys.data(), n, sums.sums.data(), sums.sums.size() / n);
          }};
}

class PyGpuLines : public GpuLines {
 public:
  PyGpuLines(int64_t capacity_rows, const RowOptimizer& rule, const std::string& policy, const std::string& rows,
             const py::object& gpu)
      : GpuLines(capacity_rows, rule, policy_of(policy), row_type_of(rows), gpu.attr("index").cast<int>(),
                 at<void>(gpu.attr("stream").cast<Address>()), model_on(gpu, rule.dim())),
        gpu(gpu) {}

  py::object gpu;
};

// For the benchmark of the kernels.
struct PyCudaRowCache {
  CudaRowCache cache;
  Stream stream;
  std::shared_ptr<CacheStreams> streams;

  PyCudaRowCache(int64_t capacity_rows, const RowOptimizer& rule, const std::string& policy, Stream stream)
      : cache(capacity_rows, rule, policy_of(policy)), stream(stream), streams(one_stream(0, stream)) {}
};

GpuRows::Model model_with_rows(const py::object& gpu, int64_t dim) {
  const Gpu held = kept(gpu);
  return {rows_by(held, "torchs_rows", dim), torchs_stream_of(held), [](const Keys& keys, const ModelRows& grads) {
            const py::gil_scoped_acquire acquire;
            const auto values = static_cast<const py::object*>(grads.memory.get())->attr("cpu")().attr("numpy")();
            py::module_::import("hetmpi.table.client")
                .attr("check_finite")(array_of(keys.array), values, "gradients of the step before");
          }};
}

void look_up(PyGpuLines& lines, const Array<int64_t>& keys, Array<int64_t> slots) {
  const auto asked = lines.empty<int64_t>(keys.size()), found = lines.empty<int64_t>(keys.size());
  check_shape(slots, "slots", {keys.shape(0)});
  std::copy_n(keys.data(), keys.size(), asked.data());
  lines.ask(asked, found, {}, false, 0).num();
  std::copy_n(found.data(), keys.size(), slots.mutable_data());
}

void bind_gpu(py::module_& m) {
  m.def("gpu_problem", &gpu_problem, "device"_a = 0, "Why this GPU cannot be used; empty if it can.");
  m.def(
      "pin", [](Address memory, int64_t num_bytes, int device) { pin(at<void>(memory), num_bytes, device); },
      "memory"_a, "num_bytes"_a, "device"_a, "Lets kernels of a GPU use memory of the host in place, until unpin().");
  m.def("unpin", [](Address memory) { unpin(at<void>(memory)); }, "memory"_a);
  py::class_<CudaUnique>(m, "CudaUnique", "Unique keys of a batch on a GPU (cpp/cuda/cuda_unique.h).")
      .def(py::init<int>(), "device"_a = 0)
      .def(
          "unique",
          [](CudaUnique& of, Address ids, int64_t n, int64_t limit, Address keys, Address index, Address order,
             Address stream) {
            return of.unique(at<const int64_t>(ids), n, limit, at<int64_t>(keys), at<int64_t>(index),
                             at<int32_t>(order), at<void>(stream));
          },
          "ids"_a, "n"_a, "limit"_a, "keys"_a, "index"_a, "order"_a, "stream"_a, WithoutGil(),
          "ids (n,) int64 below limit -> keys (n,), of which it returns how many it fills, index (n,), as _C.unique, "
          "and the order of the ids by key (row_order_size(n, n),) int32.");
  m.def("row_order_size", &RowOrder::size, "n"_a, "num_rows"_a, "Of an order of n occurrences by row, in numbers.");
  m.def("row_order_scratch", &scratch_bytes, "n"_a, "num_rows"_a, "device"_a, "Bytes that order_rows needs.");
  m.def("num_later_sums", &RowOrder::num_windows, "n"_a, "Rows of `later` in sum_by_row_on_gpu.");
  m.def(
      "order_rows",
      [](Address rows, int64_t n, int64_t num_rows, Address order, Address scratch, int device, Address stream) {
        order_rows(at<const int64_t>(rows), n, num_rows, RowOrder(at<int32_t>(order), n), at<void>(scratch), device,
                   at<void>(stream));
      },
      WithoutGil(), "rows (n,) int64 below num_rows -> order (row_order_size(n, num_rows),) int32.");
  m.def(
      "sum_by_row_on_gpu",
      [](Address values, std::array<int64_t, 3> parts, std::array<int64_t, 2> shape, Address order, Address later,
         Address sums, int device, Address stream) {
        const auto [num_parts, of_part, stride] = parts;
        const RowOrder by_row(at<int32_t>(order), num_parts * of_part);
        sum_by_row_on_gpu(at<const float>(values), num_parts, of_part, stride, by_row, shape[0], shape[1],
                          at<float>(later), at<float>(sums), device, at<void>(stream));
      },
      "values"_a, "parts"_a, "shape"_a, "order"_a, "later"_a, "sums"_a, "device"_a, "stream"_a, WithoutGil(),
      "parts: number, values in each, numbers from one to the next; shape: of sums. later: scratch memory.");
  py::class_<PyGpuLines, Lines>(m, "GpuLines", "Lines in a GPU's memory (cpp/cuda/gpu_lines.h).")
      .def(py::init<int64_t, const RowOptimizer&, const std::string&, const std::string&, py::object>(),
           "capacity_rows"_a, "rule"_a, "policy"_a, "rows"_a, "gpu"_a, "gpu: a hetmpi.gpu.Gpu.")
      .def_readonly("gpu", &PyGpuLines::gpu, "A hetmpi.gpu.Gpu.")
      .def_property_readonly("device", [](const PyGpuLines& of) { return of.gpu.attr("device"); })
      .def_property_readonly("lags",
                             [](const PyGpuLines& of) { return Array<int64_t>(LagHistogram::kBins, of.lags().bins); })
      .def("set_drift", &PyGpuLines::set_drift, "most"_a, "others"_a)
      .def(
          "read_clocks_of",
          [](PyGpuLines& of, const Partition& partition, const std::vector<Address>& clocks) {
            std::vector<const int32_t*> of_ranks;
            for (const Address address : clocks) of_ranks.push_back(at<const int32_t>(address));
            of.read_clocks_of(partition, of_ranks);
          },
          "partition"_a, "clocks"_a,
          "clocks: of the owners' shards, by rank, in pinned memory, which the caller keeps.")
      .def(
          "forget", [](PyGpuLines& of, const Array<int64_t>& keys) { of.forget(keys.data(), keys.size()); },
          as_is("keys"))
      .def("look_up", &look_up, as_is("keys"), as_is("slots"))
      .def(
          "clocks",
          [](PyGpuLines& of, const Array<int64_t>& slots) {
            Array<int32_t> clocks(slots.size());
            of.clocks(slots.data(), slots.size(), clocks.mutable_data());
            return clocks;
          },
          as_is("slots"), "c_c of each line, -1 where there is none.");
  py::class_<GpuRows, DeviceRows>(m, "GpuRows", "All rows of a table, in a GPU's memory (cpp/cuda/gpu_rows.h).")
      .def(py::init([](const Partition& partition, std::array<Address, 4> arrays, int64_t dim, int64_t state_dim,
                       const py::object& gpu) {
             const GpuRows::Arrays rows{at<float>(arrays[0]), at<float>(arrays[1]), at<int32_t>(arrays[2]),
                                        at<uint8_t>(arrays[3])};
             return new GpuRows(partition, rows, dim, state_dim, gpu.attr("index").cast<int>(),
                                model_with_rows(gpu, dim));
           }),
           "partition"_a, "arrays"_a, "dim"_a, "state_dim"_a, "gpu"_a,
           "arrays: weight, state, clock and touched, which the caller keeps. gpu: a hetmpi.gpu.Gpu.");
  py::class_<PyCudaRowCache>(m, "CudaRowCache", "RowCache in a GPU's memory (cpp/cuda/cuda_cache.h).")
      .def(py::init([](int64_t capacity_rows, const RowOptimizer& rule, const std::string& policy, Address stream) {
             return new PyCudaRowCache(capacity_rows, rule, policy, at<void>(stream));
           }),
           "capacity_rows"_a, "rule"_a, "policy"_a, "stream"_a, "stream: of all calls.")
      .def("set_step", [](PyCudaRowCache& of, double lr, int64_t step) { of.cache.set_step(lr, step); })
      .def("look_up",
           [](PyCudaRowCache& of, Address keys, int64_t n, Address slots) {
             of.cache.look_up(at<const int64_t>(keys), n, at<int64_t>(slots), of.stream);
           })
      .def("use", [](PyCudaRowCache& of, Address slots,
                     int64_t n) { of.cache.use(at<const int64_t>(slots), n, n, of.stream); })
      .def("insert_and_evict",
           [](PyCudaRowCache& of, Address keys, Address chosen, Address rows, Address states, Address clocks, int64_t n,
              Address slots) {
             of.cache.insert_and_evict(at<const int64_t>(keys), at<const uint8_t>(chosen), at<const float>(rows),
                                       at<const float>(states), at<const int32_t>(clocks), n, at<int64_t>(slots),
                                       *of.streams);
           })
      .def("gather",
           [](PyCudaRowCache& of, Address slots, int64_t n, Address out) {
             of.cache.gather(at<const int64_t>(slots), n, nullptr, at<float>(out), of.stream);
           })
      .def("update",
           [](PyCudaRowCache& of, Address slots, Address grads, int64_t n) {
             of.cache.update(at<const int64_t>(slots), at<const float>(grads), n, 1.0f, *of.streams);
           })
      .def("drop_released", [](PyCudaRowCache& of) { of.cache.take(false, *of.streams); });
}

const bool is_bound = (bind_cuda = bind_gpu, true);

}  // namespace

}  // namespace hetmpi
