// CudaRowCache and CudaUnique: lines and distinct keys in a GPU's memory, on arrays that the GPU can access
// (__cuda_array_interface__, or numpy arrays in pinned memory) and CUDA streams as integers.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "cache/cache_decisions.h"
#include "cache/row_type.h"
#include "cuda/cuda_cache.h"
#include "cuda/cuda_unique.h"
#include "owner/row_optimizer.h"
#include "python/bindings.h"

namespace hetmpi {
namespace {

template <typename T>
inline constexpr const char* kTypes = nullptr;  // as __cuda_array_interface__ writes them; bool or uint8 for bytes
template <>
inline constexpr const char* kTypes<int64_t> = "<i8";
template <>
inline constexpr const char* kTypes<int32_t> = "<i4";
template <>
inline constexpr const char* kTypes<float> = "<f4";
template <>
inline constexpr const char* kTypes<uint8_t> = "|b1 |u1";

template <typename Lengths>
std::string text_of(const Lengths& lengths) {
  std::string text = "(";
  for (const ssize_t length : lengths) text += std::to_string(length) + ",";
  return text + ")";
}

// The description of an array's memory: __cuda_array_interface__ or __array_interface__. Raises TypeError.
inline py::dict interface_of(const py::object& array, const char* name) {
  for (const char* interface : {"__cuda_array_interface__", "__array_interface__"}) {
    try {
      return array.attr(interface);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_AttributeError)) throw;
    }
  }
  throw py::type_error(std::string(name) + " must be an array, got " + std::string(py::str(py::type::of(array))));
}

// Memory of a Python array: contiguous, of this shape, on this GPU or in pinned host memory; null if it is empty. T
// const: read-only. Raises TypeError or ValueError that names the actual value.
template <typename T>
T* memory_of(const py::object& array, const char* name, std::initializer_list<ssize_t> shape, int device) {
  using Value = std::remove_const_t<T>;
  const py::dict about = interface_of(array, name);
  const std::string type = py::cast<std::string>(about["typestr"]);
  const auto found = py::cast<std::vector<ssize_t>>(about["shape"]);
  bool fits = std::string(kTypes<Value>).find(type) != std::string::npos &&
              std::equal(found.begin(), found.end(), shape.begin(), shape.end());
  const bool is_empty = std::find(found.begin(), found.end(), 0) != found.end();
  if (!is_empty && about.contains("strides") && !about["strides"].is_none()) {
    const auto strides = py::cast<std::vector<ssize_t>>(about["strides"]);
    ssize_t expected = sizeof(T);
    for (size_t axis = found.size(); axis-- > 0; expected *= found[axis])
      fits = fits && (found[axis] == 1 || strides[axis] == expected);
  }
  if (!fits)
    throw std::invalid_argument(std::string(name) + " must be contiguous, of type " + kTypes<Value> + " and shape " +
                                text_of(shape) + ", got " + type + " and " + text_of(found));
  const py::tuple data = about["data"];
  if (!std::is_const_v<T> && py::cast<bool>(data[1]))
    throw std::invalid_argument(std::string(name) + " may not be written to");
  if (is_empty) return nullptr;
  T* memory = reinterpret_cast<T*>(py::cast<uintptr_t>(data[0]));
  if (!can_use(device, memory))
    throw std::invalid_argument(std::string(name) + " must lie in the memory of GPU " + std::to_string(device) +
                                " or in pinned memory of the host");
  return memory;
}

inline ssize_t length_of(const py::object& array) { return py::len(array); }

inline Stream stream_of(uintptr_t stream) { return reinterpret_cast<Stream>(stream); }

// CudaUnique for Python.
class PyCudaUnique {
 public:
  explicit PyCudaUnique(int device) : unique_(device) {}

  int64_t unique(const py::object& ids, int64_t limit, const py::object& keys, const py::object& index,
                 uintptr_t stream) {
    const ssize_t n = length_of(ids);
    const auto* id = memory_of<const int64_t>(ids, "ids", {n}, unique_.device());
    auto *key = memory_of<int64_t>(keys, "keys", {n}, unique_.device()),
         *at = memory_of<int64_t>(index, "index", {n}, unique_.device());
    py::gil_scoped_release release;
    return unique_.unique(id, n, limit, key, at, stream_of(stream));
  }

 private:
  CudaUnique unique_;
};

// RowCache's calls for Python, on arrays that the GPU can access; the last argument of each is a CUDA stream.
class PyCudaCache {
 public:
  PyCudaCache(int64_t capacity_rows, RowOptimizer optimizer, const std::string& policy, const std::string& rows,
              int device)
      : cache_(capacity_rows, optimizer, policy_of(policy), row_type_of(rows), device) {}

  void look_up(const py::object& keys, const py::object& slots, uintptr_t stream) const {
    const ssize_t n = length_of(keys);
    const auto* key = memory_of<const int64_t>(keys, "keys", {n}, device());
    auto* slot = memory_of<int64_t>(slots, "slots", {n}, device());
    py::gil_scoped_release release;
    cache_.look_up(key, n, slot, stream_of(stream));
  }

  void use(const py::object& slots, int64_t num_keys, uintptr_t stream) {
    const ssize_t n = length_of(slots);
    const auto* slot = memory_of<const int64_t>(slots, "slots", {n}, device());
    py::gil_scoped_release release;
    cache_.use(slot, n, num_keys, stream_of(stream));
  }

  void validate(const py::object& slots, const py::object& owner_clocks, int64_t staleness, const py::object& is_stale,
                bool counts_lags, uintptr_t stream) {
    const ssize_t n = length_of(slots);
    const auto* slot = memory_of<const int64_t>(slots, "slots", {n}, device());
    const auto* clock = memory_of<const int32_t>(owner_clocks, "owner_clocks", {n}, device());
    auto* stale = memory_of<uint8_t>(is_stale, "is_stale", {n}, device());
    py::gil_scoped_release release;
    cache_.validate(slot, clock, n, staleness, stale, counts_lags, stream_of(stream));
  }

  void refresh(const py::object& slots, const py::object& chosen, const py::object& weights, const py::object& states,
               const py::object& clocks, float anticipate, uintptr_t stream) {
    const ssize_t n = length_of(slots);
    const auto* slot = memory_of<const int64_t>(slots, "slots", {n}, device());
    const Fetched rows(n, chosen, weights, states, clocks, cache_.optimizer(), device());
    py::gil_scoped_release release;
    cache_.refresh(slot, rows.chosen, rows.weights, rows.states, rows.clocks, n, anticipate, stream_of(stream));
  }

  void insert_and_evict(const py::object& keys, const py::object& chosen, const py::object& weights,
                        const py::object& states, const py::object& clocks, const py::object& slots, uintptr_t stream) {
    const ssize_t n = length_of(keys);
    const auto* key = memory_of<const int64_t>(keys, "keys", {n}, device());
    const Fetched rows(n, chosen, weights, states, clocks, cache_.optimizer(), device());
    auto* slot = memory_of<int64_t>(slots, "slots", {n}, device());
    py::gil_scoped_release release;
    cache_.insert_and_evict(key, rows.chosen, rows.weights, rows.states, rows.clocks, n, slot, stream_of(stream));
  }

  void forget(const py::object& slots, uintptr_t stream) {
    const ssize_t n = length_of(slots);
    const auto* slot = memory_of<const int64_t>(slots, "slots", {n}, device());
    py::gil_scoped_release release;
    cache_.forget(slot, n, stream_of(stream));
  }

  void gather(const py::object& slots, const py::object& out, uintptr_t stream, const py::object& others) const {
    const ssize_t n = length_of(slots);
    const auto* slot = memory_of<const int64_t>(slots, "slots", {n}, device());
    auto* to = memory_of<float>(out, "out", {n, dim()}, device());
    const auto* other = others.is_none() ? nullptr : memory_of<const float>(others, "others", {n, dim()}, device());
    py::gil_scoped_release release;
    cache_.gather(slot, n, other, to, stream_of(stream));
  }

  void look_at(const py::object& slots, const py::object& clocks, const py::object& counts, uintptr_t stream) const {
    const ssize_t n = length_of(slots);
    const auto* slot = memory_of<const int64_t>(slots, "slots", {n}, device());
    auto *clock = memory_of<int32_t>(clocks, "clocks", {n}, device()),
         *count = memory_of<int32_t>(counts, "counts", {n}, device());
    py::gil_scoped_release release;
    cache_.look_at(slot, n, clock, count, stream_of(stream));
  }

  void update(const py::object& slots, const py::object& grads, float anticipate, uintptr_t stream) {
    const ssize_t n = length_of(slots);
    const auto* slot = memory_of<const int64_t>(slots, "slots", {n}, device());
    const auto* grad = memory_of<const float>(grads, "grads", {n, dim()}, device());
    py::gil_scoped_release release;
    cache_.update(slot, grad, n, anticipate, stream_of(stream));
  }

  void push_directly(const py::object& keys, const py::object& slots, const py::object& clocks, const py::object& grads,
                     uintptr_t stream) {
    const ssize_t n = length_of(keys);
    const auto *key = memory_of<const int64_t>(keys, "keys", {n}, device()),
               *slot = memory_of<const int64_t>(slots, "slots", {n}, device());
    const auto* clock = memory_of<const int32_t>(clocks, "clocks", {n}, device());
    const auto* grad = memory_of<const float>(grads, "grads", {n, dim()}, device());
    py::gil_scoped_release release;
    cache_.push_directly(key, slot, clock, grad, n, stream_of(stream));
  }

  void take_due(const py::object& slots, int64_t staleness, uintptr_t stream) {
    const ssize_t n = length_of(slots);
    const auto* slot = memory_of<const int64_t>(slots, "slots", {n}, device());
    py::gil_scoped_release release;
    cache_.take_pending(slot, n, staleness, stream_of(stream));
  }

  void clocks_within(const py::object& slots, bool will_write, int64_t staleness, const py::object& clocks,
                     uintptr_t stream) const {
    const ssize_t n = length_of(slots);
    const auto* slot = memory_of<const int64_t>(slots, "slots", {n}, device());
    auto* clock = memory_of<int32_t>(clocks, "clocks", {n}, device());
    py::gil_scoped_release release;
    cache_.clocks_within(slot, n, will_write, staleness, clock, stream_of(stream));
  }

  void take_all(uintptr_t stream) {
    py::gil_scoped_release release;
    cache_.take_all(stream_of(stream));
  }

  std::shared_ptr<ReleasedSums> take(uintptr_t stream) {
    py::gil_scoped_release release;
    return std::make_shared<ReleasedSums>(cache_.take(stream_of(stream)));
  }

  py::array_t<int64_t> lags(uintptr_t stream) const {
    const LagHistogram lags = cache_.lags(stream_of(stream));
    return py::array_t<int64_t>(LagHistogram::kBins, lags.bins);
  }

  py::dict counts(uintptr_t stream) const {
    const CudaRowCache::Counts counts = cache_.counts(stream_of(stream));
    py::dict named;
    named["rows"] = counts.rows;
    named["pending"] = counts.pending;
    named["stale"] = counts.stale;
    named["evicted"] = counts.evicted;
    return named;
  }

  int64_t capacity_rows() const { return cache_.capacity_rows(); }
  int64_t num_released() const { return cache_.num_released(); }
  void set_step(double lr, int64_t step) { cache_.set_step(lr, step); }
  void set_drift(float most, float others) { cache_.set_drift(most, others); }

 private:
  // Arrays that are fetched with rows from their owners.
  struct Fetched {
    const uint8_t* chosen;
    const float *weights, *states;
    const int32_t* clocks;

    Fetched(ssize_t n, const py::object& chosen, const py::object& weights, const py::object& states,
            const py::object& clocks, const RowOptimizer& optimizer, int device)
        : chosen(memory_of<const uint8_t>(chosen, "chosen", {n}, device)),
          weights(memory_of<const float>(weights, "weights", {n, optimizer.dim()}, device)),
          states(memory_of<const float>(states, "states", {n, optimizer.preview_dim()}, device)),
          clocks(memory_of<const int32_t>(clocks, "clocks", {n}, device)) {}
  };

  ssize_t dim() const { return cache_.optimizer().dim(); }
  int device() const { return cache_.device(); }

  CudaRowCache cache_;
};

}  // namespace

void bind_cuda(py::module_& m) {
  m.def("gpu_problem", &gpu_problem, "Why no GPU can be used here; empty if one can.");
  py::class_<PyCudaUnique>(m, "CudaUnique", "Unique keys of a batch on a GPU (cpp/cuda/cuda_unique.h).")
      .def(py::init<int>(), "device"_a = 0)
      .def("unique", &PyCudaUnique::unique, "ids"_a, "limit"_a, "keys"_a, "index"_a, "stream"_a,
           "ids (n,) below limit -> keys (n,), of which it returns how many it fills, index (n,); as _C.unique.");
  py::class_<PyCudaCache>(m, "CudaRowCache",
                          "RowCache in a GPU's memory, on arrays it can use and a stream (cpp/cuda/cuda_cache.h).")
      .def(py::init<int64_t, RowOptimizer, const std::string&, const std::string&, int>(), "capacity_rows"_a,
           "optimizer"_a, "policy"_a, "rows"_a = "float32", "device"_a = 0)
      .def_property_readonly("capacity_rows", &PyCudaCache::capacity_rows)
      .def_property_readonly("num_released", &PyCudaCache::num_released, "Sums that take() has not returned yet.")
      .def("set_step", &PyCudaCache::set_step, "lr"_a, "step"_a)
      .def("set_drift", &PyCudaCache::set_drift, "most"_a, "others"_a)
      .def("look_up", &PyCudaCache::look_up, "keys"_a, "slots"_a, "stream"_a)
      .def("use", &PyCudaCache::use, "slots"_a, "num_keys"_a, "stream"_a)
      .def("validate", &PyCudaCache::validate, "slots"_a, "owner_clocks"_a, "staleness"_a, "is_stale"_a,
           "counts_lags"_a, "stream"_a)
      .def("refresh", &PyCudaCache::refresh, "slots"_a, "chosen"_a, "weights"_a, "states"_a, "clocks"_a, "anticipate"_a,
           "stream"_a)
      .def("insert_and_evict", &PyCudaCache::insert_and_evict, "keys"_a, "chosen"_a, "weights"_a, "states"_a,
           "clocks"_a, "slots"_a, "stream"_a)
      .def("gather", &PyCudaCache::gather, "slots"_a, "out"_a, "stream"_a, "others"_a = py::none())
      .def("forget", &PyCudaCache::forget, "slots"_a, "stream"_a)
      .def("look_at", &PyCudaCache::look_at, "slots"_a, "clocks"_a, "counts"_a, "stream"_a)
      .def("update", &PyCudaCache::update, "slots"_a, "grads"_a, "anticipate"_a, "stream"_a)
      .def("push_directly", &PyCudaCache::push_directly, "keys"_a, "slots"_a, "clocks"_a, "grads"_a, "stream"_a)
      .def("take_due", &PyCudaCache::take_due, "slots"_a, "staleness"_a, "stream"_a)
      .def("clocks_within", &PyCudaCache::clocks_within, "slots"_a, "will_write"_a, "staleness"_a, "clocks"_a,
           "stream"_a)
      .def("take_all", &PyCudaCache::take_all, "stream"_a)
      .def("take", &PyCudaCache::take, "stream"_a)
      .def("lags", &PyCudaCache::lags, "stream"_a)
      .def("counts", &PyCudaCache::counts, "stream"_a, "rows, pending, stale and evicted, as ints.");
}

}  // namespace hetmpi
