// CudaRowCache: RowCache in a GPU's memory.
#include <pybind11/numpy.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cache/cache_decisions.h"
#include "cache/row_type.h"
#include "cuda/cuda_cache.h"
#include "owner/row_optimizer.h"
#include "python/bindings.h"
#include "python/cuda_arrays.h"

namespace hetmpi {
namespace {

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

  // keys, clocks, counts, steps, sums of the pushes since the last call, in host memory.
  py::tuple take_pushes(uintptr_t stream) {
    Pushes pushes;
    {
      py::gil_scoped_release release;
      pushes = cache_.take_pushes(stream_of(stream));
    }
    const ssize_t n = pushes.keys.size(), width = cache_.optimizer().sum_dim();
    return py::make_tuple(py::array_t<int64_t>(n, pushes.keys.data()), py::array_t<int32_t>(n, pushes.clocks.data()),
                          py::array_t<int32_t>(n, pushes.counts.data()),
                          py::array_t<int32_t>({n, ssize_t{2}}, reinterpret_cast<const int32_t*>(pushes.steps.data())),
                          py::array_t<float>({n, width}, pushes.sums.data()));
  }

  // Keys of the pushes, without taking them.
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

void bind_cuda_row_cache(py::module_& m) {
  py::class_<PyCudaCache>(m, "CudaRowCache",
                          "RowCache in a GPU's memory, on arrays it can use and a stream (cpp/cuda/cuda_cache.h).")
      .def(py::init<int64_t, RowOptimizer, const std::string&, const std::string&, int>(), py::arg("capacity_rows"),
           py::arg("optimizer"), py::arg("policy"), py::arg("rows") = "float32", py::arg("device") = 0)
      .def_property_readonly("capacity_rows", &PyCudaCache::capacity_rows)
      .def_property_readonly("num_pushes", &PyCudaCache::num_pushes, "Pushes that take_pushes has not returned yet.")
      .def("set_step", &PyCudaCache::set_step, py::arg("lr"), py::arg("step"))
      .def("set_drift", &PyCudaCache::set_drift, py::arg("most"), py::arg("others"))
      .def("look_up", &PyCudaCache::look_up, py::arg("keys"), py::arg("slots"), py::arg("stream"))
      .def("use", &PyCudaCache::use, py::arg("slots"), py::arg("num_keys"), py::arg("stream"))
      .def("validate", &PyCudaCache::validate, py::arg("slots"), py::arg("owner_clocks"), py::arg("staleness"),
           py::arg("is_stale"), py::arg("counts_lags"), py::arg("stream"))
      .def("refresh", &PyCudaCache::refresh, py::arg("slots"), py::arg("chosen"), py::arg("weights"), py::arg("states"),
           py::arg("clocks"), py::arg("anticipate"), py::arg("stream"))
      .def("insert_and_evict", &PyCudaCache::insert_and_evict, py::arg("keys"), py::arg("chosen"), py::arg("weights"),
           py::arg("states"), py::arg("clocks"), py::arg("slots"), py::arg("stream"))
      .def("gather", &PyCudaCache::gather, py::arg("slots"), py::arg("out"), py::arg("stream"),
           py::arg("others") = py::none())
      .def("forget", &PyCudaCache::forget, py::arg("slots"), py::arg("stream"))
      .def("look_at", &PyCudaCache::look_at, py::arg("slots"), py::arg("clocks"), py::arg("counts"), py::arg("stream"))
      .def("update", &PyCudaCache::update, py::arg("slots"), py::arg("grads"), py::arg("anticipate"), py::arg("stream"))
      .def("push_directly", &PyCudaCache::push_directly, py::arg("keys"), py::arg("slots"), py::arg("clocks"),
           py::arg("grads"), py::arg("stream"))
      .def("take_due", &PyCudaCache::take_due, py::arg("slots"), py::arg("staleness"), py::arg("stream"))
      .def("clocks_within", &PyCudaCache::clocks_within, py::arg("slots"), py::arg("will_write"), py::arg("staleness"),
           py::arg("clocks"), py::arg("stream"))
      .def("take_all", &PyCudaCache::take_all, py::arg("stream"))
      .def("take_pushes", &PyCudaCache::take_pushes, py::arg("stream"))
      .def("lags", &PyCudaCache::lags, py::arg("stream"))
      .def("counts", &PyCudaCache::counts, py::arg("stream"), "rows, pending, stale and evicted, as ints.");
}

}  // namespace hetmpi
