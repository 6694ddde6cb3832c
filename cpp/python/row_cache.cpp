// RowCache in host memory.
#include "cache/row_cache.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cache/cache_decisions.h"
#include "cache/pull_parts.h"
#include "cache/row_type.h"
#include "owner/row_optimizer.h"
#include "python/arrays.h"
#include "python/bindings.h"

namespace hetmpi {
namespace {

// As classify(), after validate() has set is_stale (n).
py::tuple judged(const Array<int64_t>& slots, const Array<bool>& fetched, const Array<bool>& is_decided,
                 Array<bool> is_stale) {
  const ssize_t n = slots.shape(0);
  check_shape(fetched, "fetched", {n});
  check_shape(is_decided, "is_decided", {n});
  check_shape(is_stale, "is_stale", {n});
  Array<bool> is_missing(n);
  const Judged found =
      judge(slots.data(), fetched.data(), is_decided.data(), n, is_stale.mutable_data(), is_missing.mutable_data());
  return py::make_tuple(is_stale, is_missing, found.num_found, found.num_stale, found.num_missing);
}

// RowCache with its pushes. Arrays of one batch of n keys: slots (n) int64, clocks (n) int32, chosen (n) bool,
// weights and grads (n, dim), states (n, preview_dim) float32.
class PyCache {
 public:
  PyCache(int64_t capacity_rows, RowOptimizer optimizer, const std::string& policy, const std::string& rows)
      : cache_(capacity_rows, optimizer, policy_of(policy), row_type_of(rows)),
        populating_([this] { cache_.populate(stops_); }) {}

  ~PyCache() {
    stops_ = true;
    populating_.join();
  }

  void look_up(const Array<int64_t>& keys, Array<int64_t> slots) const {
    const ssize_t n = keys.shape(0);
    check_shape(slots, "slots", {n});
    const int64_t* key = keys.data();
    int64_t* out = slots.mutable_data();
    py::gil_scoped_release release;
    cache_.look_up(key, n, out);
  }

  // validate() of the lines of keys that are not `fetched` (n), and what follows from it: masks (n) of the lines to
  // refresh, which are the fetched ones, and the stale ones unless it is decided that they are not read now; and of the
  // rows that are needed, not fetched yet and not decided about. And the numbers of lines found, of those to refresh,
  // and of these rows.
  py::tuple classify(const Array<int64_t>& slots, const Array<bool>& fetched, const Array<bool>& is_decided,
                     const Array<int32_t>& owner_clocks, int64_t staleness) {
    const ssize_t n = checked(slots);
    check_shape(owner_clocks, "owner_clocks", {n});
    check_shape(fetched, "fetched", {n});
    Array<bool> is_stale(n);
    const int64_t* slot = slots.data();
    const bool* is_here = fetched.data();
    auto* stale = reinterpret_cast<uint8_t*>(is_stale.mutable_data());
    {
      const int32_t* clock = owner_clocks.data();
      py::gil_scoped_release release;
      kept_.assign(slot, slot + n);
      for (ssize_t i = 0; i < n; ++i)
        if (is_here[i]) kept_[i] = -1;
      cache_.validate(kept_.data(), clock, n, staleness, stale, &lags_);
    }
    return judged(slots, fetched, is_decided, is_stale);
  }

  void refresh(const Array<int64_t>& slots, const Array<bool>& chosen, const Array<float>& weights,
               const Array<float>& states, const Array<int32_t>& clocks, float anticipate) {
    const ssize_t n = checked(slots);
    check_rows(n, chosen, weights, states, clocks);
    const int64_t* slot = slots.data();
    const int32_t* clock = clocks.data();
    const auto* mask = reinterpret_cast<const uint8_t*>(chosen.data());
    const float *weight = weights.data(), *state = states.data();
    py::gil_scoped_release release;
    cache_.refresh(slot, mask, weight, state, clock, n, anticipate);
  }

  // Numbers of keys that are chosen and have no slot, and of evicted lines.
  py::tuple insert_and_evict(const Array<int64_t>& keys, const Array<bool>& chosen, const Array<float>& weights,
                             const Array<float>& states, const Array<int32_t>& clocks, Array<int64_t> slots) {
    const ssize_t n = checked(slots);
    check_shape(keys, "keys", {n});
    check_rows(n, chosen, weights, states, clocks);
    const int64_t* key = keys.data();
    const int32_t* clock = clocks.data();
    const auto* mask = reinterpret_cast<const uint8_t*>(chosen.data());
    const float *weight = weights.data(), *state = states.data();
    int64_t* slot = slots.mutable_data();
    int64_t num_missing = 0, num_evicted;
    {
      py::gil_scoped_release release;
      for (ssize_t i = 0; i < n; ++i) num_missing += slot[i] < 0 && mask[i];
      num_evicted = cache_.insert_and_evict(key, mask, weight, state, clock, n, slot, &pushes_);
    }
    return py::make_tuple(num_missing, num_evicted);
  }

  void gather(const Array<int64_t>& slots, Array<float> out) {
    const ssize_t n = checked(slots);
    check_shape(out, "out", {n, cache_.dim()});
    const int64_t* slot = slots.data();
    float* to = out.mutable_data();
    py::gil_scoped_release release;
    cache_.gather(slot, n, to);
  }

  void update(const Array<int64_t>& slots, const Array<float>& grads, float anticipate) {
    const ssize_t n = checked(slots);
    check_shape(grads, "grads", {n, cache_.dim()});
    const int64_t* slot = slots.data();
    const float* grad = grads.data();
    py::gil_scoped_release release;
    cache_.update(slot, grad, n, anticipate);
  }

  void push_directly(const Array<int64_t>& keys, const Array<int64_t>& slots, const Array<int32_t>& clocks,
                     const Array<float>& grads) {
    const ssize_t n = checked(slots);
    check_shape(keys, "keys", {n});
    check_shape(clocks, "clocks", {n});
    check_shape(grads, "grads", {n, cache_.dim()});
    const int64_t *key = keys.data(), *slot = slots.data();
    const int32_t* clock = clocks.data();
    const float* grad = grads.data();
    py::gil_scoped_release release;
    cache_.push_directly(key, slot, clock, grad, n, &pushes_);
  }

  void take_due(const Array<int64_t>& slots, int64_t staleness) {
    const ssize_t n = checked(slots);
    const int64_t* slot = slots.data();
    py::gil_scoped_release release;
    cache_.take_pending(slot, n, staleness, &pushes_);
  }

  void use(const Array<int64_t>& slots, int64_t num_keys) { cache_.use(slots.data(), checked(slots), num_keys); }

  Array<int32_t> clocks_within(const Array<int64_t>& slots, bool will_write, int64_t staleness) const {
    const ssize_t n = checked(slots);
    Array<int32_t> clocks(n);
    cache_.clocks_within(slots.data(), n, will_write, staleness, clocks.mutable_data());
    return clocks;
  }

  void preview(const Array<int64_t>& positions, Array<float> weights, Array<float> states, Array<int32_t> clocks,
               Array<float> sums, const Array<int32_t>& counts, Array<int32_t> sum_clocks, float anticipate) const {
    const ssize_t m = positions.shape(0), n = clocks.shape(0);
    check_in(positions.data(), m, n, "positions", -1);
    check_shape(weights, "weights", {n, cache_.dim()});
    check_shape(states, "states", {n, cache_.preview_dim()});
    check_shape(sums, "sums", {m, cache_.sum_dim()});
    check_shape(counts, "counts", {m});
    check_shape(sum_clocks, "sum_clocks", {m});
    cache_.preview(positions.data(), m, sums.mutable_data(), counts.data(), sum_clocks.mutable_data(), anticipate,
                   weights.mutable_data(), states.mutable_data(), clocks.mutable_data());
  }

  void take_all() {
    py::gil_scoped_release release;
    cache_.take_pending(&pushes_);
  }

  // keys, clocks, counts, steps, sums of the pushes since the last call.
  py::tuple take_pushes() {
    const ssize_t n = pushes_.keys.size(), num_floats = pushes_.sums.size();
    Pushes next;
    next.sums.reserve(num_floats + num_floats / 4);  // the next ones may be as many: growing would copy them
    py::array sums = owned(std::move(pushes_.sums)).reshape({n, ssize_t{cache_.sum_dim()}});
    py::array_t<int32_t> steps({n, ssize_t{2}}, reinterpret_cast<const int32_t*>(pushes_.steps.data()));
    py::tuple taken = py::make_tuple(owned(std::move(pushes_.keys)), owned(std::move(pushes_.clocks)),
                                     owned(std::move(pushes_.counts)), steps, sums);
    pushes_ = std::move(next);
    return taken;
  }

  Array<int32_t> clocks(const Array<int64_t>& slots) const {
    const ssize_t n = checked(slots);
    Array<int32_t> out(n);
    for (ssize_t i = 0; i < n; ++i) out.mutable_at(i) = slots.at(i) < 0 ? -1 : cache_.clock(slots.at(i));
    return out;
  }

  Array<int64_t> lags() const { return Array<int64_t>(LagHistogram::kBins, lags_.bins); }
  int64_t num_pushes() const { return static_cast<int64_t>(pushes_.keys.size()); }

  RowCache cache_;
  std::atomic<bool> stops_{false};
  std::thread populating_;

 private:
  // An array that takes over the vector's memory.
  template <typename T, typename Allocator>
  static py::array_t<T> owned(std::vector<T, Allocator>&& values) {
    using Vector = std::vector<T, Allocator>;
    auto* kept = new Vector(std::move(values));
    py::capsule owner(kept, [](void* p) { delete static_cast<Vector*>(p); });
    return py::array_t<T>(kept->size(), kept->data(), owner);
  }

  ssize_t checked(const Array<int64_t>& slots) const {
    check_shape(slots, "slots", {-1});
    const ssize_t n = slots.shape(0);
    check_in(slots.data(), n, cache_.num_slots(), "slots", -1);
    return n;
  }

  void check_rows(ssize_t n, const Array<bool>& chosen, const Array<float>& weights, const Array<float>& states,
                  const Array<int32_t>& clocks) const {
    check_shape(chosen, "chosen", {n});
    check_shape(weights, "weights", {n, cache_.dim()});
    check_shape(states, "states", {n, cache_.preview_dim()});
    check_shape(clocks, "clocks", {n});
  }

  Pushes pushes_;
  LagHistogram lags_;
  std::vector<int64_t> kept_;  // slots that classify() validates
};

}  // namespace

void bind_row_cache(py::module_& m) {
  m.attr("UNBOUNDED") = kUnbounded;
  m.attr("UNKNOWN_CLOCK") = kUnknownClock;
  m.attr("NO_LINE") = kNoLine;
  m.attr("WAYS") = kWays;
  m.attr("LINE_OVERHEAD_BYTES") = RowCache::kLineOverhead;

  m.def("judged", &judged, py::arg("slots").noconvert(), py::arg("fetched").noconvert(),
        py::arg("is_decided").noconvert(), py::arg("is_stale").noconvert(),
        "As RowCache.classify, after validate has set is_stale.");

  py::class_<PyCache>(m, "RowCache", "Rows a rank keeps, with gradients not pushed yet (cpp/cache/row_cache.h).")
      .def(py::init<int64_t, RowOptimizer, const std::string&, const std::string&>(), py::arg("capacity_rows"),
           py::arg("optimizer"), py::arg("policy"), py::arg("rows") = "float32")
      .def_property_readonly("capacity_rows", [](const PyCache& c) { return c.cache_.capacity_rows(); })
      .def_property_readonly("num_pushes", &PyCache::num_pushes, "Pushes that take_pushes has not returned yet.")
      .def_property_readonly("lags", &PyCache::lags)
      .def(
          "set_step", [](PyCache& c, double lr, int64_t step) { c.cache_.set_step(lr, step); }, py::arg("lr"),
          py::arg("step"))
      .def(
          "set_drift", [](PyCache& c, float most, float others) { c.cache_.set_drift(most, others); }, py::arg("most"),
          py::arg("others"))
      .def("look_up", &PyCache::look_up, py::arg("keys").noconvert(), py::arg("slots").noconvert())
      .def("classify", &PyCache::classify, py::arg("slots").noconvert(), py::arg("fetched").noconvert(),
           py::arg("is_decided").noconvert(), py::arg("owner_clocks").noconvert(), py::arg("staleness"))
      .def("refresh", &PyCache::refresh, py::arg("slots").noconvert(), py::arg("chosen").noconvert(),
           py::arg("weights").noconvert(), py::arg("states").noconvert(), py::arg("clocks").noconvert(),
           py::arg("anticipate"))
      .def("insert_and_evict", &PyCache::insert_and_evict, py::arg("keys").noconvert(), py::arg("chosen").noconvert(),
           py::arg("weights").noconvert(), py::arg("states").noconvert(), py::arg("clocks").noconvert(),
           py::arg("slots").noconvert())
      .def(
          "forget", [](PyCache& c, const Array<int64_t>& keys) { c.cache_.forget(keys.data(), keys.size()); },
          py::arg("keys").noconvert())
      .def("gather", &PyCache::gather, py::arg("slots").noconvert(), py::arg("out").noconvert())
      .def("update", &PyCache::update, py::arg("slots").noconvert(), py::arg("grads").noconvert(),
           py::arg("anticipate"))
      .def("push_directly", &PyCache::push_directly, py::arg("keys").noconvert(), py::arg("slots").noconvert(),
           py::arg("clocks").noconvert(), py::arg("grads").noconvert())
      .def("take_due", &PyCache::take_due, py::arg("slots").noconvert(), py::arg("staleness"))
      .def("use", &PyCache::use, py::arg("slots").noconvert(), py::arg("num_keys"))
      .def("clocks_within", &PyCache::clocks_within, py::arg("slots").noconvert(), py::arg("will_write"),
           py::arg("staleness"))
      .def("preview", &PyCache::preview, py::arg("positions").noconvert(), py::arg("weights").noconvert(),
           py::arg("states").noconvert(), py::arg("clocks").noconvert(), py::arg("sums").noconvert(),
           py::arg("counts").noconvert(), py::arg("sum_clocks").noconvert(), py::arg("anticipate"))
      .def("take_all", &PyCache::take_all)
      .def("take_pushes", &PyCache::take_pushes)
      .def("clocks", &PyCache::clocks, py::arg("slots").noconvert(), "c_c of each line, -1 where there is none.");
}

}  // namespace hetmpi
