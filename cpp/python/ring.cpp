// RecordFormat and RingProducer.
#include "owner/ring.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>

#include "owner/push_applier.h"
#include "python/arrays.h"
#include "python/bindings.h"

namespace hetmpi {
namespace {

RingProducer producer_of(Array<uint8_t> memory, RecordFormat format) {
  constexpr ssize_t kHeaderBytes = sizeof(RingHeader);
  return {memory.mutable_data(), static_cast<uint64_t>(std::max(memory.size(), kHeaderBytes) - kHeaderBytes), format};
}

}  // namespace

void bind_ring(py::module_& m) {
  m.attr("RING_HEADER_BYTES") = sizeof(RingHeader);

  py::class_<RecordFormat>(m, "RecordFormat", "What is sent of each row (cpp/owner/ring.h).")
      .def(py::init<int64_t, bool>(), py::arg("width"), py::arg("has_clocks"))
      .def_readonly("has_steps", &RecordFormat::has_steps)
      .def(
          "has_squares",
          [](const RecordFormat& format, const Array<int32_t>& counts) {
            Array<bool> mask(counts.size());
            for (ssize_t i = 0; i < counts.size(); ++i) mask.mutable_data()[i] = format.has_squares(counts.data()[i]);
            return mask;
          },
          py::arg("counts").noconvert(), "Mask (n,) bool of the rows, of counts (n,), that are sent with squares.");
  m.def("push_format", &push_format, py::arg("rule"), "What is sent of a push's rows.");
  m.def("min_ring_capacity", &min_ring_capacity, py::arg("format"));

  py::class_<RingProducer>(m, "RingProducer", "The producer's end of a ring (cpp/owner/ring.h).")
      .def(py::init(&producer_of), py::arg("memory").noconvert(), py::arg("format"), py::keep_alive<1, 2>())
      .def_property_readonly("head", &RingProducer::head, "Bytes ever written.")
      .def_property_readonly("tail", &RingProducer::tail, "Bytes that the owner has applied.")
      .def_property_readonly("is_drained", &RingProducer::is_drained, "Whether it has applied all.");
}

}  // namespace hetmpi
