// PushApplier: an owner's side at staleness s >= 1; and its thread.
#include "python/push_applier.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "owner/directory.h"
#include "owner/row_optimizer.h"
#include "python/arrays.h"
#include "python/bindings.h"

namespace hetmpi {
void bind_push_applier(py::module_& m) {
  py::class_<PyPushApplier>(m, "PushApplier",
                            "The owner's side of a table at staleness s >= 1 (cpp/owner/push_applier.h).")
      .def(py::init<ShardArrays&, const RowOptimizer&>(), py::arg("shard"), py::arg("rule"), py::keep_alive<1, 2>())
      .def("set_step", &PyPushApplier::set_step, py::arg("lrs"), py::arg("step"))
      .def("drain", &PyPushApplier::drain, "Applies what has arrived; returns the rows applied.")
      .def("apply_record", &PyPushApplier::apply_record, py::arg("keys").noconvert(), py::arg("clocks").noconvert(),
           py::arg("counts").noconvert(), py::arg("steps").noconvert(), py::arg("grads").noconvert(),
           py::arg("squares").noconvert())
      .def("watch", &PyPushApplier::watch, py::arg("rings"), "The rings whose pushes are applied.")
      .def_property_readonly("num_histories", &PyPushApplier::num_histories, "Rows of which pushes are kept.");
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<ApplierThread>(m, "ApplierThread", "Applies what arrives for all tables of a rank while it computes.")
      .def(py::init())
      .def(
          "add", [](ApplierThread& thread, PyPushApplier& applier) { thread.add(&applier.core()); }, py::arg("applier"),
          without_gil, "Drains the rings of a PushApplier too, which must live until remove().")
      .def(
          "remove", [](ApplierThread& thread, PyPushApplier& applier) { thread.remove(&applier.core()); },
          py::arg("applier"), without_gil, "An applier that was not added, or is removed, has no effect.");
}

}  // namespace hetmpi
