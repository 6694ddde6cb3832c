// hetmpi._C.CudaRowCache: checks what comes from Python, calls the core. Compiled where nvcc is (setup.py).
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda_cache.h"
#include "cuda_unique.h"

namespace py = pybind11;
using py::ssize_t;

namespace hetmpi {
namespace {

template <typename T>
constexpr const char* kTypes = nullptr;  // as __cuda_array_interface__ writes them; bool or uint8 for bytes
template <>
constexpr const char* kTypes<int64_t> = "<i8";
template <>
constexpr const char* kTypes<int32_t> = "<i4";
template <>
constexpr const char* kTypes<float> = "<f4";
template <>
constexpr const char* kTypes<uint8_t> = "|b1 |u1";

template <typename Lengths>
std::string text_of(const Lengths& lengths) {
  std::string text = "(";
  for (const ssize_t length : lengths) text += std::to_string(length) + ",";
  return text + ")";
}

// What describes the memory of an array: __cuda_array_interface__, or numpy's of the same form. Raises TypeError.
py::dict interface_of(const py::object& array, const char* name) {
  for (const char* interface : {"__cuda_array_interface__", "__array_interface__"}) {
    try {
      return array.attr(interface);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_AttributeError)) throw;
    }
  }
  throw py::type_error(std::string(name) + " must be an array, got " + std::string(py::str(py::type::of(array))));
}

// Memory of an array of Python's: contiguous, of this shape, on this GPU or in pinned memory of the host. T const: to be read
// alone. Raises TypeError or ValueError that says what came.
template <typename T>
T* memory_of(const py::object& array, const char* name, std::initializer_list<ssize_t> shape, int device) {
  using Value = std::remove_const_t<T>;
  const py::dict about = interface_of(array, name);
  const std::string type = py::cast<std::string>(about["typestr"]);
  const auto found = py::cast<std::vector<ssize_t>>(about["shape"]);
  bool fits = std::string(kTypes<Value>).find(type) != std::string::npos && std::equal(found.begin(), found.end(), shape.begin(), shape.end());
  const bool is_empty = std::find(found.begin(), found.end(), 0) != found.end();
  if (!is_empty && about.contains("strides") && !about["strides"].is_none()) {
    const auto strides = py::cast<std::vector<ssize_t>>(about["strides"]);
    ssize_t expected = sizeof(T);
    for (size_t axis = found.size(); axis-- > 0; expected *= found[axis]) fits = fits && (found[axis] == 1 || strides[axis] == expected);
  }
  if (!fits)
    throw std::invalid_argument(std::string(name) + " must be contiguous, of type " + kTypes<Value> + " and shape " +
                                text_of(shape) + ", got " + type + " and " + text_of(found));
  const py::tuple data = about["data"];
  if (!std::is_const_v<T> && py::cast<bool>(data[1])) throw std::invalid_argument(std::string(name) + " may not be written to");
  T* memory = reinterpret_cast<T*>(py::cast<uintptr_t>(data[0]));
  if (!is_empty && !can_use(device, memory))
    throw std::invalid_argument(std::string(name) + " must lie in the memory of GPU " + std::to_string(device) +
                                " or in pinned memory of the host");
  return memory;
}

ssize_t length_of(const py::object& array) { return py::len(array); }

Stream stream_of(uintptr_t stream) { return reinterpret_cast<Stream>(stream); }

// RowCache's calls as Python sees them, on arrays that the GPU can use; each takes the number of a CUDA stream last.
class PyCudaCache {
 public:
  PyCudaCache(int64_t capacity_rows, RowOptimizer optimizer, const std::string& policy, const std::string& rows, int device)
      : cache_(capacity_rows, optimizer, policy_of(policy), row_type_of(rows), device) {}

  void look_up(const py::object& keys, const py::object& slots, uintptr_t stream) const {
    const ssize_t n = length_of(keys);
    const auto *key = memory_of<const int64_t>(keys, "keys", {n}, device());
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

  void insert_and_evict(const py::object& keys, const py::object& chosen, const py::object& weights, const py::object& states,
                        const py::object& clocks, const py::object& slots, uintptr_t stream) {
    const ssize_t n = length_of(keys);
    const auto* key = memory_of<const int64_t>(keys, "keys", {n}, device());
    const Fetched rows(n, chosen, weights, states, clocks, cache_.optimizer(), device());
    auto* slot = memory_of<int64_t>(slots, "slots", {n}, device());
    py::gil_scoped_release release;
    cache_.insert_and_evict(key, rows.chosen, rows.weights, rows.states, rows.clocks, n, slot, stream_of(stream));
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
    auto *clock = memory_of<int32_t>(clocks, "clocks", {n}, device()), *count = memory_of<int32_t>(counts, "counts", {n}, device());
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

  void pass_on(const py::object& keys, const py::object& slots, const py::object& clocks, const py::object& grads,
               uintptr_t stream) {
    const ssize_t n = length_of(keys);
    const auto *key = memory_of<const int64_t>(keys, "keys", {n}, device()), *slot = memory_of<const int64_t>(slots, "slots", {n}, device());
    const auto* clock = memory_of<const int32_t>(clocks, "clocks", {n}, device());
    const auto* grad = memory_of<const float>(grads, "grads", {n, dim()}, device());
    py::gil_scoped_release release;
    cache_.pass_on(key, slot, clock, grad, n, stream_of(stream));
  }

  void take_due(const py::object& slots, int64_t staleness, const py::object& held, uintptr_t stream) {
    const ssize_t n = length_of(slots), num_held = length_of(held);
    const auto *slot = memory_of<const int64_t>(slots, "slots", {n}, device()), *kept = memory_of<const int64_t>(held, "held", {num_held}, device());
    py::gil_scoped_release release;
    cache_.take_pending(slot, n, staleness, kept, num_held, stream_of(stream));
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

  // keys, clocks, counts, sums of all that was handed out since the last call, in the host's memory.
  py::tuple take_pushes(uintptr_t stream) {
    Pushes pushes;
    {
      py::gil_scoped_release release;
      pushes = cache_.take_pushes(stream_of(stream));
    }
    const ssize_t n = pushes.keys.size(), width = cache_.optimizer().sum_dim();
    return py::make_tuple(py::array_t<int64_t>(n, pushes.keys.data()), py::array_t<int32_t>(n, pushes.clocks.data()),
                          py::array_t<int32_t>(n, pushes.counts.data()), py::array_t<float>({n, width}, pushes.sums.data()));
  }

  // Keys of all that, which stays handed out.
  py::array_t<int64_t> handed_out(uintptr_t stream) {
    const std::vector<int64_t>& keys = cache_.keys_handed_out(stream_of(stream));
    return py::array_t<int64_t>(keys.size(), keys.data());
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
  int64_t num_pushes() const { return cache_.num_pushes(); }
  void set_step(double lr, int64_t step) { cache_.set_step(lr, step); }

 private:
  // What comes with rows from their owners.
  struct Fetched {
    const uint8_t* chosen;
    const float *weights, *states;
    const int32_t* clocks;

    Fetched(ssize_t n, const py::object& chosen, const py::object& weights, const py::object& states, const py::object& clocks,
            const RowOptimizer& optimizer, int device)
        : chosen(memory_of<const uint8_t>(chosen, "chosen", {n}, device)),
          weights(memory_of<const float>(weights, "weights", {n, optimizer.dim()}, device)),
          states(memory_of<const float>(states, "states", {n, optimizer.state_dim()}, device)),
          clocks(memory_of<const int32_t>(clocks, "clocks", {n}, device)) {}
  };

  ssize_t dim() const { return cache_.optimizer().dim(); }
  int device() const { return cache_.device(); }

  CudaRowCache cache_;
};

// CudaUnique as Python sees it.
class PyCudaUnique {
 public:
  explicit PyCudaUnique(int device) : unique_(device) {}

  int64_t unique(const py::object& ids, int64_t limit, const py::object& keys, const py::object& index, uintptr_t stream) {
    const ssize_t n = length_of(ids);
    const auto* id = memory_of<const int64_t>(ids, "ids", {n}, unique_.device());
    auto *key = memory_of<int64_t>(keys, "keys", {n}, unique_.device()), *at = memory_of<int64_t>(index, "index", {n}, unique_.device());
    py::gil_scoped_release release;
    return unique_.unique(id, n, limit, key, at, stream_of(stream));
  }

 private:
  CudaUnique unique_;
};

}  // namespace

void bind_cuda(py::module_& m);  // for bindings.cpp

void bind_cuda(py::module_& m) {
  m.def("gpu_problem", &gpu_problem, "Why no GPU can be used here; empty if one can.");

  py::class_<PyCudaUnique>(m, "CudaUnique", "Unique keys of a batch on a GPU (cpp/cuda_unique.h).")
      .def(py::init<int>(), py::arg("device") = 0)
      .def("unique", &PyCudaUnique::unique, py::arg("ids"), py::arg("limit"), py::arg("keys"), py::arg("index"), py::arg("stream"),
           "ids (n,) below limit -> keys (n,), of which it returns how many it fills, index (n,); as _C.unique.");

  py::class_<PyCudaCache>(m, "CudaRowCache", "RowCache in a GPU's memory, on arrays it can use and a stream (cpp/cuda_cache.h).")
      .def(py::init<int64_t, RowOptimizer, const std::string&, const std::string&, int>(), py::arg("capacity_rows"),
           py::arg("optimizer"), py::arg("policy"), py::arg("rows") = "float32", py::arg("device") = 0)
      .def_property_readonly("capacity_rows", &PyCudaCache::capacity_rows)
      .def_property_readonly("num_pushes", &PyCudaCache::num_pushes, "Sums handed out and not taken yet.")
      .def("set_step", &PyCudaCache::set_step, py::arg("lr"), py::arg("step"))
      .def("look_up", &PyCudaCache::look_up, py::arg("keys"), py::arg("slots"), py::arg("stream"))
      .def("use", &PyCudaCache::use, py::arg("slots"), py::arg("num_keys"), py::arg("stream"))
      .def("validate", &PyCudaCache::validate, py::arg("slots"), py::arg("owner_clocks"), py::arg("staleness"),
           py::arg("is_stale"), py::arg("counts_lags"), py::arg("stream"))
      .def("refresh", &PyCudaCache::refresh, py::arg("slots"), py::arg("chosen"), py::arg("weights"), py::arg("states"),
           py::arg("clocks"), py::arg("anticipate"), py::arg("stream"))
      .def("insert_and_evict", &PyCudaCache::insert_and_evict, py::arg("keys"), py::arg("chosen"), py::arg("weights"),
           py::arg("states"), py::arg("clocks"), py::arg("slots"), py::arg("stream"))
      .def("gather", &PyCudaCache::gather, py::arg("slots"), py::arg("out"), py::arg("stream"), py::arg("others") = py::none())
      .def("look_at", &PyCudaCache::look_at, py::arg("slots"), py::arg("clocks"), py::arg("counts"), py::arg("stream"))
      .def("update", &PyCudaCache::update, py::arg("slots"), py::arg("grads"), py::arg("anticipate"), py::arg("stream"))
      .def("pass_on", &PyCudaCache::pass_on, py::arg("keys"), py::arg("slots"), py::arg("clocks"), py::arg("grads"),
           py::arg("stream"))
      .def("take_due", &PyCudaCache::take_due, py::arg("slots"), py::arg("staleness"), py::arg("held"), py::arg("stream"))
      .def("clocks_within", &PyCudaCache::clocks_within, py::arg("slots"), py::arg("will_write"), py::arg("staleness"),
           py::arg("clocks"), py::arg("stream"))
      .def("take_all", &PyCudaCache::take_all, py::arg("stream"))
      .def("take_pushes", &PyCudaCache::take_pushes, py::arg("stream"))
      .def("handed_out", &PyCudaCache::handed_out, py::arg("stream"))
      .def("lags", &PyCudaCache::lags, py::arg("stream"))
      .def("counts", &PyCudaCache::counts, py::arg("stream"), "rows, pending, stale and evicted, as ints.");
}

}  // namespace hetmpi
