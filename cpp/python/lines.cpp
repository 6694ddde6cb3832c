// Lines: host memory's, and those that are written in Python (hetmpi/table/gpu_cache.py).
#include "python/lines.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

#include "cache/cache_decisions.h"
#include "cache/row_type.h"
#include "client/host_lines.h"
#include "owner/row_optimizer.h"
#include "python/arrays.h"
#include "python/bindings.h"
#include "python/wire_arrays.h"

namespace hetmpi {

py::object object_of(const ModelRows& rows, int64_t dim) {
  if (rows.at == nullptr) return *static_cast<const py::object*>(rows.memory.get());
  const Array<float> array({static_cast<ssize_t>(rows.num), static_cast<ssize_t>(dim)}, rows.at, owner_of(rows.memory));
  return py::module_::import("torch").attr("from_numpy")(array);
}

ModelRows rows_of(const py::object& tensor, const Lines& lines) {
  const auto n = tensor.attr("size")(0).cast<int64_t>();
  if (lines.form().computes_beside) return {nullptr, n, kept(tensor)};
  const Buffer<float> rows = host_rows_of(tensor, lines.form().dim);
  return {rows.data(), n, rows.memory()};
}

Buffer<float> host_rows_of(const py::object& tensor, int64_t dim) {
  Array<float> array = tensor.attr("numpy")().cast<Array<float>>();
  check_shape(array, "gradients", {-1, static_cast<ssize_t>(dim)});
  return buffer_of(std::move(array));
}

namespace {

// Lines whose methods are Python's. They may be called without the GIL.
class PyLines : public Lines {
 public:
  using Lines::Lines;

  std::shared_ptr<void> allocate(int64_t num_bytes) override {
    py::gil_scoped_acquire acquire;
    return buffer_of(call("empty", num_bytes, py::dtype::of<uint8_t>()).cast<Array<uint8_t>>()).memory();
  }

  void set_step(double lr, int64_t step) override {
    py::gil_scoped_acquire acquire;
    call("set_step", lr, step);
  }

  void ask(const Buffer<int64_t>& keys, const Buffer<int64_t>& slots, const Buffer<int32_t>& known, bool will_write,
           int64_t bound) override {
    py::gil_scoped_acquire acquire;
    const py::object clocks = known.size() > 0 ? array_of(known) : py::object(py::none());
    call("ask", array_of(keys), array_of(slots), clocks, will_write, bound);
  }

  void judge(const Buffer<int64_t>& slots, const uint8_t* is_fetched, const Buffer<int32_t>& clocks, int64_t num_keys,
             int64_t bound, const Buffer<uint8_t>& is_stale) override {
    py::gil_scoped_acquire acquire;
    const Array<bool> fetched(slots.size(), reinterpret_cast<const bool*>(is_fetched));
    call("judge", array_of(slots), fetched, array_of(clocks), num_keys, bound, array_of(is_stale));
  }

  void accept(const Buffer<int64_t>& slots, const Buffer<uint8_t>& chosen, const Buffer<float>& weights,
              const Buffer<float>& states, const Buffer<int32_t>& clocks, float anticipate) override {
    py::gil_scoped_acquire acquire;
    call("accept", array_of(slots), array_of(chosen), rows_in(weights, slots.size(), form().dim),
         rows_in(states, slots.size(), form().preview_dim), array_of(clocks), anticipate);
  }

  ModelRows rows(const Buffer<int64_t>& slots, const Buffer<float>& weights, int64_t n) override {
    py::gil_scoped_acquire acquire;
    const py::object places = slots.size() == n ? array_of(slots) : py::object(py::none());
    return {nullptr, n, kept(call("rows", places, rows_in(weights, n, form().dim)))};
  }

  ModelRows moved(const Buffer<float>& weights, int64_t n) override {
    py::gil_scoped_acquire acquire;
    return {nullptr, n, kept(call("moved", rows_in(weights, n, form().dim)))};
  }

  Inserted insert(const Buffer<int64_t>& keys, const Buffer<uint8_t>& chosen, const ModelRows& weights,
                  const Buffer<float>& states, const Buffer<int32_t>& clocks, const Buffer<int64_t>& slots) override {
    py::gil_scoped_acquire acquire;
    const auto [num_missing, num_evicted] =
        call("insert", array_of(keys), array_of(chosen), object_of(weights, form().dim),
             rows_in(states, slots.size(), form().preview_dim), array_of(clocks), array_of(slots))
            .cast<std::pair<int64_t, int64_t>>();
    return {num_missing, num_evicted};
  }

  void update(const Buffer<int64_t>& keys, const Buffer<int64_t>& slots, const Buffer<int32_t>& clocks,
              const ModelRows& grads, float anticipate) override {
    py::gil_scoped_acquire acquire;
    call("update", array_of(keys), array_of(slots), array_of(clocks), object_of(grads, form().dim), anticipate);
  }

  void due(const Buffer<int64_t>& slots, int64_t bound) override {
    py::gil_scoped_acquire acquire;
    call("due", array_of(slots), bound);
  }

  void due_all() override {
    py::gil_scoped_acquire acquire;
    call("due_all");
  }

  int64_t num_released() override {
    py::gil_scoped_acquire acquire;
    return call("num_released").cast<int64_t>();
  }

  ReleasedSums take() override {
    py::gil_scoped_acquire acquire;
    auto [keys, clocks, counts, steps, sums] =
        call("take").cast<std::tuple<Array<int64_t>, Array<int32_t>, Array<int32_t>, Array<int32_t>, Array<float>>>();
    const auto of_steps = buffer_of(std::move(steps));
    return {buffer_of(std::move(keys)), buffer_of(std::move(clocks)), buffer_of(std::move(counts)),
            Buffer<Steps>(of_steps.memory(), of_steps.size() / 2), buffer_of(std::move(sums))};
  }

 private:
  template <typename... Arguments>
  py::object call(const char* name, Arguments&&... arguments) const {
    const py::function method = py::get_override(static_cast<const Lines*>(this), name);
    if (!method) throw py::type_error(std::string("lines have no method ") + name);
    return method(std::forward<Arguments>(arguments)...);
  }

  // (n, width).
  static Array<float> rows_in(const Buffer<float>& rows, int64_t n, int64_t width) {
    return array_of(rows, {static_cast<ssize_t>(n), static_cast<ssize_t>(width)});
  }
};

// RowCache's calls on arrays of one batch of n keys: slots (n) int64, clocks (n) int32, chosen (n) bool, weights and
// grads (n, dim), states (n, preview_dim) float32.
class PyHostLines : public HostLines {
 public:
  PyHostLines(int64_t capacity_rows, const RowOptimizer& rule, const std::string& policy, const std::string& rows)
      : HostLines(capacity_rows, rule, policy_of(policy), row_type_of(rows)) {}

  void look_up(const Array<int64_t>& keys, Array<int64_t> slots) {
    check_shape(slots, "slots", {keys.shape(0)});
    const int64_t* key = keys.data();
    int64_t* out = slots.mutable_data();
    const ssize_t n = keys.shape(0);
    py::gil_scoped_release release;
    cache().look_up(key, n, out);
  }

  void use(const Array<int64_t>& slots, int64_t num_keys) { cache().use(slots.data(), checked(slots), num_keys); }

  void refresh(const Array<int64_t>& slots, const Array<bool>& chosen, const Array<float>& weights,
               const Array<float>& states, const Array<int32_t>& clocks, float anticipate) {
    const ssize_t n = check_rows(slots, chosen, weights, states, clocks);
    cache().refresh(slots.data(), reinterpret_cast<const uint8_t*>(chosen.data()), weights.data(), states.data(),
                    clocks.data(), n, anticipate);
  }

  // Numbers of keys that are chosen and have no slot, and of evicted lines.
  std::pair<int64_t, int64_t> insert_and_evict(const Array<int64_t>& keys, const Array<bool>& chosen,
                                               const Array<float>& weights, const Array<float>& states,
                                               const Array<int32_t>& clocks, Array<int64_t> slots) {
    check_shape(keys, "keys", {check_rows(slots, chosen, weights, states, clocks)});
    const ModelRows rows{const_cast<float*>(weights.data()), weights.shape(0), nullptr};
    const auto [missing, evicted] = insert(buffer_of(keys), buffer_of(chosen), rows, buffer_of(states),
                                           buffer_of(clocks), buffer_of(std::move(slots)));
    return {missing, evicted};
  }

  void gather(const Array<int64_t>& slots, Array<float> out) {
    check_shape(out, "out", {checked(slots), cache().dim()});
    cache().gather(slots.data(), slots.shape(0), out.mutable_data());
  }

  void update(const Array<int64_t>& slots, const Array<float>& grads, float anticipate) {
    check_shape(grads, "grads", {checked(slots), cache().dim()});
    cache().update(slots.data(), grads.data(), slots.shape(0), anticipate);
  }

  void take_due(const Array<int64_t>& slots, int64_t staleness) {
    cache().take_pending(slots.data(), checked(slots), staleness, &released());
  }

  Array<int32_t> clocks_within(const Array<int64_t>& slots, bool will_write, int64_t staleness) {
    Array<int32_t> clocks(checked(slots));
    cache().clocks_within(slots.data(), slots.shape(0), will_write, staleness, clocks.mutable_data());
    return clocks;
  }

  // keys, clocks, counts, steps, sums of what is released since the last call.
  py::tuple take_pushes() {
    const ReleasedSums taken = take();
    const ssize_t n = taken.keys.size();
    const Buffer<int32_t> steps(taken.steps.memory(), 2 * n);
    return py::make_tuple(array_of(taken.keys), array_of(taken.clocks), array_of(taken.counts),
                          array_of(steps, {n, ssize_t{2}}), array_of(taken.sums, {n, ssize_t{cache().sum_dim()}}));
  }

  Array<int32_t> clocks(const Array<int64_t>& slots) {
    Array<int32_t> out(checked(slots));
    for (ssize_t i = 0; i < out.size(); ++i) out.mutable_at(i) = slots.at(i) < 0 ? -1 : cache().clock(slots.at(i));
    return out;
  }

  void forget(const Array<int64_t>& keys) { cache().forget(keys.data(), keys.size()); }

 private:
  ssize_t checked(const Array<int64_t>& slots) {
    check_shape(slots, "slots", {-1});
    check_in(slots.data(), slots.shape(0), cache().num_slots(), "slots", -1);
    return slots.shape(0);
  }

  ssize_t check_rows(const Array<int64_t>& slots, const Array<bool>& chosen, const Array<float>& weights,
                     const Array<float>& states, const Array<int32_t>& clocks) {
    const ssize_t n = checked(slots);
    check_shape(chosen, "chosen", {n});
    check_shape(weights, "weights", {n, cache().dim()});
    check_shape(states, "states", {n, cache().preview_dim()});
    check_shape(clocks, "clocks", {n});
    return n;
  }
};

}  // namespace

void bind_lines(py::module_& m) {
  m.attr("UNBOUNDED") = kUnbounded;
  m.attr("UNKNOWN_CLOCK") = kUnknownClock;
  m.attr("NO_LINE") = kNoLine;
  m.attr("WAYS") = kWays;
  m.attr("LINE_OVERHEAD_BYTES") = RowCache::kLineOverhead;

  py::class_<Lines, PyLines>(m, "Lines", "The cache of rows, as a client uses it (cpp/client/lines.h).")
      .def(py::init([](int64_t capacity_rows, const RowOptimizer& rule) {
             return new PyLines({capacity_rows, rule.dim(), rule.preview_dim(), rule.sum_dim(), true});
           }),
           py::arg("capacity_rows"), py::arg("rule"))
      .def_property_readonly("capacity_rows", &Lines::capacity_rows, "Lines; with 0 no key has one.")
      .def_property_readonly(
          "computes_beside", [](const Lines& of) { return of.form().computes_beside; },
          "Whether another processor computes the model, so that the host can prepare the next batch meanwhile.");

  py::class_<PyHostLines, Lines>(m, "HostLines", "Lines in host memory (cpp/client/host_lines.h, cache/row_cache.h).")
      .def(py::init<int64_t, const RowOptimizer&, const std::string&, const std::string&>(), py::arg("capacity_rows"),
           py::arg("rule"), py::arg("policy"), py::arg("rows") = "float32")
      .def_property_readonly("lags",
                             [](const PyHostLines& of) { return Array<int64_t>(LagHistogram::kBins, of.lags().bins); })
      .def("set_step", &PyHostLines::set_step, py::arg("lr"), py::arg("step"))
      .def(
          "set_drift", [](PyHostLines& of, float most, float others) { of.cache().set_drift(most, others); },
          py::arg("most"), py::arg("others"))
      .def("look_up", &PyHostLines::look_up, py::arg("keys").noconvert(), py::arg("slots").noconvert())
      .def("use", &PyHostLines::use, py::arg("slots").noconvert(), py::arg("num_keys"))
      .def("refresh", &PyHostLines::refresh, py::arg("slots").noconvert(), py::arg("chosen").noconvert(),
           py::arg("weights").noconvert(), py::arg("states").noconvert(), py::arg("clocks").noconvert(),
           py::arg("anticipate"))
      .def("insert_and_evict", &PyHostLines::insert_and_evict, py::arg("keys").noconvert(),
           py::arg("chosen").noconvert(), py::arg("weights").noconvert(), py::arg("states").noconvert(),
           py::arg("clocks").noconvert(), py::arg("slots").noconvert())
      .def("gather", &PyHostLines::gather, py::arg("slots").noconvert(), py::arg("out").noconvert())
      .def("update", &PyHostLines::update, py::arg("slots").noconvert(), py::arg("grads").noconvert(),
           py::arg("anticipate"))
      .def("take_due", &PyHostLines::take_due, py::arg("slots").noconvert(), py::arg("staleness"))
      .def("take_all", &PyHostLines::due_all)
      .def("take_pushes", &PyHostLines::take_pushes)
      .def("clocks_within", &PyHostLines::clocks_within, py::arg("slots").noconvert(), py::arg("will_write"),
           py::arg("staleness"))
      .def("forget", &PyHostLines::forget, py::arg("keys").noconvert())
      .def("clocks", &PyHostLines::clocks, py::arg("slots").noconvert(), "c_c of each line, -1 where there is none.");
  m.def(
      "preview_sums",
      [](const RowOptimizer& rule, const Array<int64_t>& positions, Array<float> weights, Array<float> states,
         Array<int32_t> clocks, Array<float> sums, const Array<int32_t>& counts, Array<int32_t> sum_clocks,
         float anticipate) {
        const ssize_t n = positions.shape(0), num_rows = clocks.shape(0);
        check_in(positions.data(), n, num_rows, "positions", -1);
        check_shape(weights, "weights", {num_rows, rule.dim()});
        check_shape(states, "states", {num_rows, rule.preview_dim()});
        check_shape(sums, "sums", {n, rule.sum_dim()});
        check_shape(counts, "counts", {n});
        check_shape(sum_clocks, "sum_clocks", {n});
        preview_sums(rule, positions.data(), n, sums.mutable_data(), counts.data(), sum_clocks.mutable_data(),
                     anticipate, weights.mutable_data(), states.mutable_data(), clocks.mutable_data());
      },
      py::arg("rule"), py::arg("positions").noconvert(), py::arg("weights").noconvert(), py::arg("states").noconvert(),
      py::arg("clocks").noconvert(), py::arg("sums").noconvert(), py::arg("counts").noconvert(),
      py::arg("sum_clocks").noconvert(), py::arg("anticipate"), "As in cpp/cache/row_cache.h.");
}

}  // namespace hetmpi
