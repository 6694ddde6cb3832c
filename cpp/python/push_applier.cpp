// PushApplier: an owner's side at staleness s >= 1.
#include "python/push_applier.h"

#include "owner/row_optimizer.h"
#include "python/arrays.h"
#include "python/bindings.h"

namespace hetmpi {
void bind_push_applier(py::module_& m) {
  py::class_<PyPushApplier>(
      m, "PushApplier",
      "The owner's side at staleness s >= 1: a thread that applies what arrives (cpp/owner/push_applier.h).")
      .def(py::init<Array<uint8_t>, Array<float>, Array<float>, Array<int32_t>, Array<uint8_t>, Array<float>,
                    RowOptimizer>(),
           py::arg("rings").noconvert(), py::arg("weight").noconvert(), py::arg("state").noconvert(),
           py::arg("clock").noconvert(), py::arg("touched").noconvert(), py::arg("mean_square").noconvert(),
           py::arg("optimizer"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 4>(),
           py::keep_alive<1, 5>(), py::keep_alive<1, 6>(), py::keep_alive<1, 7>())
      .def("set_step", &PyPushApplier::set_step, py::arg("lrs"), py::arg("step"))
      .def("drain", &PyPushApplier::drain, "Applies what has arrived; returns the rows applied.")
      .def("apply", &PyPushApplier::apply, py::arg("rows").noconvert(), py::arg("values").noconvert(),
           py::arg("order").noconvert(), py::arg("clocks").noconvert(), py::arg("counts").noconvert(),
           py::arg("steps").noconvert())
      .def("apply_record", &PyPushApplier::apply_record, py::arg("rows").noconvert(), py::arg("clocks").noconvert(),
           py::arg("counts").noconvert(), py::arg("steps").noconvert(), py::arg("grads").noconvert(),
           py::arg("squares").noconvert())
      .def("gather", &PyPushApplier::gather_own, py::arg("weight").noconvert(), py::arg("rows").noconvert(),
           py::arg("out").noconvert(), py::arg("order").noconvert())
      .def("start", &PyPushApplier::start, py::arg("origins"), "Begins to apply the pushes of these ranks.")
      .def("stop", &PyPushApplier::stop);
}

}  // namespace hetmpi
