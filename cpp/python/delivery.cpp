// Delivery: gradients on their way into the rings of their owners.
#include "wire/delivery.h"

#include <pybind11/stl.h>

#include <optional>
#include <utility>
#include <vector>

#include "python/arrays.h"
#include "python/bindings.h"
#include "python/wire_arrays.h"

namespace hetmpi {
namespace {

class PyDelivery {
 public:
  using Rings = std::vector<std::optional<RingArrays>>;  // of each rank

  PyDelivery(Rings rings, PushArrays push, RecordFormat format)
      : rings_(std::move(rings)), push_(std::move(push)), core_(views(), checked(format)) {}

  bool proceed() {
    py::gil_scoped_release release;
    return core_.proceed();
  }

  std::vector<int64_t> full() const { return core_.full(); }

 private:
  PushView checked(RecordFormat format) const {
    check_shape(push_.route.first, "first", {static_cast<ssize_t>(rings_.size()) + 1});
    return push_.view(format);
  }

  std::vector<NodeRing> views() const {
    std::vector<NodeRing> found;
    for (const auto& ring : rings_) found.push_back(ring ? ring->view() : NodeRing{});
    return found;
  }

  Rings rings_;
  PushArrays push_;
  Delivery core_;
};

}  // namespace

void bind_delivery(py::module_& m) {
  py::class_<PyDelivery>(m, "Delivery", "Gradients on their way into the rings of their owners (cpp/wire/delivery.h).")
      .def(py::init<PyDelivery::Rings, PushArrays, RecordFormat>(), py::arg("rings"), py::arg("push"),
           py::arg("format"), "rings: of each rank, None where there is none; they must live as long.")
      .def("proceed", &PyDelivery::proceed, "Writes what fits; True once all is written.")
      .def_property_readonly("full", &PyDelivery::full, "Ranks whose rings lack room, ascending.");
}

}  // namespace hetmpi
