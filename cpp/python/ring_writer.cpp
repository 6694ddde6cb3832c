// RingWriter: gradients on their way into the rings of their owners.
#include "wire/ring_writer.h"

#include <pybind11/stl.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "python/arrays.h"
#include "python/bindings.h"
#include "python/wire_arrays.h"

namespace hetmpi {
namespace {

class PyRingWriter {
 public:
  using Rings = std::vector<RingProducer*>;

  PyRingWriter(const Rings& rings, PyMessage push, RecordFormat format)
      : push_(std::move(push)), core_(rings, checked(rings.size(), format)) {}

  bool proceed() {
    py::gil_scoped_release release;
    return core_.proceed();
  }

  std::vector<int64_t> full() const { return core_.full(); }

 private:
  PushView checked(ssize_t num_ranks, RecordFormat format) const {
    if (push_.route->num_ranks() != num_ranks) throw std::invalid_argument("a ring writer takes a ring for each rank");
    return push_.view(format);
  }

  PyMessage push_;
  RingWriter core_;
};

}  // namespace

void bind_ring_writer(py::module_& m) {
  py::class_<PyRingWriter>(m, "RingWriter",
                           "Gradients on their way into the rings of their owners (cpp/wire/ring_writer.h).")
      .def(py::init<const PyRingWriter::Rings&, PyMessage, RecordFormat>(), py::arg("rings"), py::arg("push"),
           py::arg("format"), py::keep_alive<1, 2>(), "rings: to each rank, None where nothing is to be written.")
      .def("proceed", &PyRingWriter::proceed, "Writes what fits; True once all is written.")
      .def_property_readonly("full", &PyRingWriter::full, "Ranks whose rings lack room, ascending.");
}

}  // namespace hetmpi
