// RowOptimizer.
#include <cstdint>
#include <string>

#include "owner/row_optimizer.h"
#include "python/arrays.h"
#include "python/bindings.h"

namespace hetmpi {
namespace {

// Applies sums over `count` iterations of one rank, for tests: rows of weight (n, dim), state (n, state_dim), sums (n,
// sum_dim).
void apply_sums(const RowOptimizer& rule, Array<float> weight, Array<float> state, const Array<float>& sums,
                int64_t count) {
  const ssize_t n = weight.shape(0);
  check_shape(weight, "weight", {n, rule.dim()});
  check_shape(state, "state", {n, rule.state_dim()});
  check_shape(sums, "sums", {n, rule.sum_dim()});
  for (ssize_t i = 0; i < n; ++i)
    rule.apply(weight.mutable_data() + i * rule.dim(), state.mutable_data() + i * rule.state_dim(),
               rule.summed(sums.data() + i * rule.sum_dim(), count));
}

// One step of the rows that any rank touched, as at an owner: grads (n, dim) summed over ranks, touched (n) > 0.
void apply_touched(const RowOptimizer& rule, Array<float> weight, Array<float> state, Array<int32_t> clock,
                   const Array<float>& grads, const Array<float>& touched) {
  const ssize_t n = clock.shape(0);
  check_shape(weight, "weight", {n, rule.dim()});
  check_shape(state, "state", {n, rule.state_dim()});
  check_shape(grads, "grads", {n, rule.dim()});
  check_shape(touched, "touched", {n});
  float *weights = weight.mutable_data(), *states = state.mutable_data();
  int32_t* clocks = clock.mutable_data();
  const float *grad = grads.data(), *count = touched.data();
  py::gil_scoped_release release;
  for (ssize_t row = 0; row < n; ++row) {
    if (count[row] <= 0) continue;
    rule.apply(weights + row * rule.dim(), states + row * rule.state_dim(), {grad + row * rule.dim()});
    ++clocks[row];
  }
}

}  // namespace

void bind_optimizer(py::module_& m) {
  py::class_<RowOptimizer>(m, "RowOptimizer")
      .def(py::init<const std::string&, int64_t, float, float, float, float>(), py::arg("rule"), py::arg("dim"),
           py::arg("weight_decay"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"))
      .def_property_readonly("state_dim", &RowOptimizer::state_dim)
      .def_property_readonly("sum_dim", &RowOptimizer::sum_dim)
      .def_property_readonly("is_plain", &RowOptimizer::is_plain)
      .def("apply_sums", &apply_sums, py::arg("weight").noconvert(), py::arg("state").noconvert(),
           py::arg("sums").noconvert(), py::arg("count"))
      .def("apply_touched", &apply_touched, py::arg("weight").noconvert(), py::arg("state").noconvert(),
           py::arg("clock").noconvert(), py::arg("grads").noconvert(), py::arg("touched").noconvert())
      .def("set_step", &RowOptimizer::set_step, py::arg("lr"), py::arg("step"));
}

}  // namespace hetmpi
