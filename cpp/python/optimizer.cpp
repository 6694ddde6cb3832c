// RowOptimizer.
#include <cstdint>
#include <string>

#include "owner/push_history.h"
#include "owner/row_optimizer.h"
#include "python/arrays.h"
#include "python/bindings.h"

namespace hetmpi {
namespace {

// The states of cache lines, of rows' states (n, state_dim): (n, preview_dim), or (n, 0) if they are not kept.
void mean_squares(const RowOptimizer& rule, const Array<float>& state, Array<float> out) {
  const ssize_t n = state.shape(0);
  check_shape(state, "state", {n, rule.state_dim()});
  check_shape(out, "out", {n, -1});
  if (out.shape(1) == 0) return;
  check_shape(out, "out", {n, rule.preview_dim()});
  const float* states = state.data();
  float* means = out.mutable_data();
  py::gil_scoped_release release;
  for (ssize_t row = 0; row < n; ++row) means[row] = rule.mean_square(states + row * rule.state_dim());
}

}  // namespace

void bind_optimizer(py::module_& m) {
  py::class_<RowOptimizer>(m, "RowOptimizer")
      .def(py::init<const std::string&, int64_t, float, float, float, float, float, float>(), py::arg("rule"),
           py::arg("dim"), py::arg("weight_decay"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("l1"),
           py::arg("l2"))
      .def_property_readonly("state_dim", &RowOptimizer::state_dim)
      .def_property_readonly("preview_dim", &RowOptimizer::preview_dim)
      .def_property_readonly("sum_dim", &RowOptimizer::sum_dim)
      .def_property_readonly("is_plain", &RowOptimizer::is_plain)
      .def_property_readonly(
          "history_bytes", [](const RowOptimizer& rule) { return rule.is_plain() ? 0 : PushHistory::row_bytes(rule); },
          "Memory of an owner for each row of which it keeps pushes, at most (cpp/owner/push_history.h).")
      .def("mean_squares", &mean_squares, py::arg("state").noconvert(), py::arg("out").noconvert())
      .def("set_step", &RowOptimizer::set_step, py::arg("lr"), py::arg("step"));
}

}  // namespace hetmpi
