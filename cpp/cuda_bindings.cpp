// hetmpi._C.CudaRowCache: checks what comes from Python, calls the core. Compiled where nvcc is (setup.py).
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "cuda_cache.h"

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

// Memory of a GPU array of Python's: anything with __cuda_array_interface__, contiguous, of this shape; -1 admits any length.
// Raises TypeError or ValueError that says what came.
template <typename T>
T* memory_of(const py::object& array, const char* name, std::initializer_list<ssize_t> shape) {
  if (!py::hasattr(array, "__cuda_array_interface__"))
    throw py::type_error(std::string(name) + " must be an array in the GPU's memory, got " +
                         std::string(py::str(py::type::of(array))));
  const py::dict about = array.attr("__cuda_array_interface__");
  const std::string type = py::cast<std::string>(about["typestr"]);
  const auto found = py::cast<std::vector<ssize_t>>(about["shape"]);
  bool fits = std::string(kTypes<T>).find(type) != std::string::npos && found.size() == shape.size();
  for (size_t axis = 0; fits && axis < found.size(); ++axis) fits = shape.begin()[axis] < 0 || shape.begin()[axis] == found[axis];
  if (about.contains("strides") && !about["strides"].is_none()) {
    const auto strides = py::cast<std::vector<ssize_t>>(about["strides"]);
    ssize_t expected = sizeof(T);
    for (size_t axis = found.size(); axis-- > 0; expected *= found[axis]) fits = fits && (found[axis] <= 1 || strides[axis] == expected);
  }
  if (!fits) {
    std::string wanted, came;
    for (const ssize_t length : shape) wanted += (length < 0 ? "*" : std::to_string(length)) + ",";
    for (const ssize_t length : found) came += std::to_string(length) + ",";
    throw std::invalid_argument(std::string(name) + " must be contiguous, of type " + kTypes<T> + " and shape (" + wanted +
                                "), got " + type + " and (" + came + ")");
  }
  return reinterpret_cast<T*>(py::cast<uintptr_t>(py::tuple(about["data"])[0]));
}

ssize_t length_of(const py::object& array) { return py::len(array); }

Stream stream_of(uintptr_t stream) { return reinterpret_cast<Stream>(stream); }

// RowCache's calls as Python sees them, on GPU arrays; each takes the number of a CUDA stream last.
class PyCudaCache {
 public:
  PyCudaCache(int64_t capacity_rows, RowOptimizer optimizer, const std::string& policy)
      : cache_(capacity_rows, optimizer, policy_of(policy)) {}

  void look_up(const py::object& keys, const py::object& slots, uintptr_t stream) const {
    const ssize_t n = length_of(keys);
    const auto *key = memory_of<int64_t>(keys, "keys", {n});
    auto* slot = memory_of<int64_t>(slots, "slots", {n});
    py::gil_scoped_release release;
    cache_.look_up(key, n, slot, stream_of(stream));
  }

  void use(const py::object& slots, int64_t num_keys, uintptr_t stream) {
    const ssize_t n = length_of(slots);
    const auto* slot = memory_of<int64_t>(slots, "slots", {n});
    py::gil_scoped_release release;
    cache_.use(slot, n, num_keys, stream_of(stream));
  }

  void validate(const py::object& slots, const py::object& owner_clocks, int64_t staleness, const py::object& is_stale,
                bool counts_lags, uintptr_t stream) {
    const ssize_t n = length_of(slots);
    const auto* slot = memory_of<int64_t>(slots, "slots", {n});
    const auto* clock = memory_of<int32_t>(owner_clocks, "owner_clocks", {n});
    auto* stale = memory_of<uint8_t>(is_stale, "is_stale", {n});
    py::gil_scoped_release release;
    cache_.validate(slot, clock, n, staleness, stale, counts_lags, stream_of(stream));
  }

  void refresh(const py::object& slots, const py::object& chosen, const py::object& weights, const py::object& states,
               const py::object& clocks, float anticipate, uintptr_t stream) {
    const ssize_t n = length_of(slots);
    const auto* slot = memory_of<int64_t>(slots, "slots", {n});
    const Fetched rows(n, chosen, weights, states, clocks, cache_.optimizer());
    py::gil_scoped_release release;
    cache_.refresh(slot, rows.chosen, rows.weights, rows.states, rows.clocks, n, anticipate, stream_of(stream));
  }

  void insert_and_evict(const py::object& keys, const py::object& chosen, const py::object& weights, const py::object& states,
                        const py::object& clocks, const py::object& slots, uintptr_t stream) {
    const ssize_t n = length_of(keys);
    const auto* key = memory_of<int64_t>(keys, "keys", {n});
    const Fetched rows(n, chosen, weights, states, clocks, cache_.optimizer());
    auto* slot = memory_of<int64_t>(slots, "slots", {n});
    py::gil_scoped_release release;
    cache_.insert_and_evict(key, rows.chosen, rows.weights, rows.states, rows.clocks, n, slot, stream_of(stream));
  }

  void gather(const py::object& slots, const py::object& out, uintptr_t stream) const {
    const ssize_t n = length_of(slots);
    const auto* slot = memory_of<int64_t>(slots, "slots", {n});
    auto* to = memory_of<float>(out, "out", {n, dim()});
    py::gil_scoped_release release;
    cache_.gather(slot, n, to, stream_of(stream));
  }

  void update(const py::object& slots, const py::object& grads, float anticipate, uintptr_t stream) {
    const ssize_t n = length_of(slots);
    const auto* slot = memory_of<int64_t>(slots, "slots", {n});
    const auto* grad = memory_of<float>(grads, "grads", {n, dim()});
    py::gil_scoped_release release;
    cache_.update(slot, grad, n, anticipate, stream_of(stream));
  }

  void pass_on(const py::object& keys, const py::object& slots, const py::object& clocks, const py::object& grads,
               uintptr_t stream) {
    const ssize_t n = length_of(keys);
    const auto *key = memory_of<int64_t>(keys, "keys", {n}), *slot = memory_of<int64_t>(slots, "slots", {n});
    const auto* clock = memory_of<int32_t>(clocks, "clocks", {n});
    const auto* grad = memory_of<float>(grads, "grads", {n, dim()});
    py::gil_scoped_release release;
    cache_.pass_on(key, slot, clock, grad, n, stream_of(stream));
  }

  void take_due(const py::object& slots, int64_t staleness, const py::object& held, uintptr_t stream) {
    const ssize_t n = length_of(slots), num_held = length_of(held);
    const auto *slot = memory_of<int64_t>(slots, "slots", {n}), *kept = memory_of<int64_t>(held, "held", {num_held});
    py::gil_scoped_release release;
    cache_.take_pending(slot, n, staleness, kept, num_held, stream_of(stream));
  }

  void clocks_within(const py::object& slots, bool will_write, int64_t staleness, const py::object& clocks,
                     uintptr_t stream) const {
    const ssize_t n = length_of(slots);
    const auto* slot = memory_of<int64_t>(slots, "slots", {n});
    auto* clock = memory_of<int32_t>(clocks, "clocks", {n});
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
            const RowOptimizer& optimizer)
        : chosen(memory_of<uint8_t>(chosen, "chosen", {n})),
          weights(memory_of<float>(weights, "weights", {n, optimizer.dim()})),
          states(memory_of<float>(states, "states", {n, optimizer.state_dim()})),
          clocks(memory_of<int32_t>(clocks, "clocks", {n})) {}
  };

  ssize_t dim() const { return cache_.optimizer().dim(); }

  CudaRowCache cache_;
};

}  // namespace

void bind_cuda(py::module_& m);  // for bindings.cpp

void bind_cuda(py::module_& m) {
  m.def("gpu_problem", [] {
    std::string why;
    cuda_is_usable(&why);
    return why;
  }, "Why no GPU can be used here; empty if one can.");

  py::class_<PyCudaCache>(m, "CudaRowCache", "RowCache in a GPU's memory, on GPU arrays and a stream (cpp/cuda_cache.h).")
      .def(py::init<int64_t, RowOptimizer, const std::string&>(), py::arg("capacity_rows"), py::arg("optimizer"),
           py::arg("policy"))
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
      .def("gather", &PyCudaCache::gather, py::arg("slots"), py::arg("out"), py::arg("stream"))
      .def("update", &PyCudaCache::update, py::arg("slots"), py::arg("grads"), py::arg("anticipate"), py::arg("stream"))
      .def("pass_on", &PyCudaCache::pass_on, py::arg("keys"), py::arg("slots"), py::arg("clocks"), py::arg("grads"),
           py::arg("stream"))
      .def("take_due", &PyCudaCache::take_due, py::arg("slots"), py::arg("staleness"), py::arg("held"), py::arg("stream"))
      .def("clocks_within", &PyCudaCache::clocks_within, py::arg("slots"), py::arg("will_write"), py::arg("staleness"),
           py::arg("clocks"), py::arg("stream"))
      .def("take_all", &PyCudaCache::take_all, py::arg("stream"))
      .def("take_pushes", &PyCudaCache::take_pushes, py::arg("stream"))
      .def("counts", &PyCudaCache::counts, py::arg("stream"), "rows, pending, stale and evicted, as ints.");
}

}  // namespace hetmpi
