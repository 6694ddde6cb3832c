// Spans: contexts that time the parts of a step.
#include "spans.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "counters.h"
#include "python/arrays.h"
#include "python/bindings.h"

namespace hetmpi {
namespace {

struct Span {
  Spans* spans;
  Part part;
};

Span span_of(Spans& spans, const std::string& part) {
  const auto at = std::find(kPartNames.begin(), kPartNames.end(), part);
  if (at == kPartNames.end()) throw py::key_error(part);
  return {&spans, static_cast<Part>(at - kPartNames.begin())};
}

}  // namespace

void bind_spans(py::module_& m) {
  m.attr("PARTS") = py::tuple(py::cast(kPartNames));
  py::class_<Span>(m, "Span", "One part, entered repeatedly.")
      .def("__enter__", [](const Span& of) { of.spans->enter(of.part); })
      .def("__exit__", [](const Span& of, const py::args&) { of.spans->leave(of.part); });
  py::class_<Spans>(m, "Spans",
                    "Time of one rank by part of a step (hetmpi/spans.py). Parts follow each other and are never "
                    "nested.")
      .def(py::init<bool>(), "keeps_trace"_a = false)
      .def("__call__", &span_of, "part"_a, py::keep_alive<0, 1>(), "A context whose time is added to `part`.")
      .def("now", &Spans::now, "doing"_a, "Sets the current activity outside the parts of a step, for the watchdog.")
      .def_readwrite("step", &Spans::step, "Current step, from 0.")
      .def_readwrite(
          "on_pause", &Spans::on_pause,
          "Of a simulation; None otherwise. Called as on_pause(next) before each part, with the part's name, "
          "and within parts, with \"\", where another rank's stores could matter.")
      .def_property_readonly("doing", &Spans::doing, "Current part, or the argument of now().")
      .def_property_readonly("ticks", &Spans::ticks, "Number of changes of `doing`.")
      .def_property_readonly(
          "trace",
          [](const Spans& spans) {
            py::list trace;
            for (const auto& [part, begin, end] : spans.trace())
              trace.append(py::make_tuple(kPartNames[part], begin, end));
            return trace;
          },
          "The last (part, begin, end), in seconds since 1970; empty unless requested.")
      .def(
          "as_array",
          [](const Spans& spans) {
            Array<double> milliseconds(kNumParts);
            for (int part = 0; part < kNumParts; ++part) milliseconds.mutable_at(part) = 1000 * spans.seconds()[part];
            return milliseconds;
          },
          "Milliseconds of each part, (number of parts,) float64.");
  py::class_<Counters>(m, "Counters", "hetmpi/counters.py, of a table, while it counts.")
      .def(py::init())
      .def_readwrite("pages_read", &Counters::pages_read)
      .def_readwrite("pages_written", &Counters::pages_written)
      .def_readwrite("disk_steps", &Counters::disk_steps)
      .def("as_array", [](const Counters& of) {
        return Array<int64_t>(sizeof(of) / sizeof(int64_t), reinterpret_cast<const int64_t*>(&of));
      });
}

}  // namespace hetmpi
