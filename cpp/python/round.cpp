// Message: the gradients of a step; RoundServer: the owners' side of a table's messages.
#include "wire/round.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "python/arrays.h"
#include "python/bindings.h"
#include "python/round_server.h"
#include "python/wire_arrays.h"

namespace hetmpi {
void bind_round(py::module_& m) {
  py::class_<PyMessage>(m, "Message", "The gradients that one rank sends to the owners in one step.")
      .def(
          py::init([](int64_t step, std::shared_ptr<const Route> route, Array<float> values,
                      std::optional<Array<int32_t>> clocks, std::optional<Array<int32_t>> counts,
                      std::optional<Array<int32_t>> steps) {
            return PyMessage{step, std::move(route), values, clocks, counts, steps};
          }),
          py::arg("step"), py::arg("route"), py::arg("values").noconvert(), py::arg("clocks").noconvert() = py::none(),
          py::arg("counts").noconvert() = py::none(), py::arg("steps").noconvert() = py::none(),
          "For each key of `route` a row of values (n, width) float32; at s >= 1 also its clock (n,) int32, the number "
          "of iterations summed (n,) int32, and unless the rule is plain SGD their first and last step (n, 2) int32.")
      .def_readonly("step", &PyMessage::step)
      .def_readonly("route", &PyMessage::route)
      .def_readonly("values", &PyMessage::values)
      .def_readonly("clocks", &PyMessage::clocks)
      .def_readonly("counts", &PyMessage::counts)
      .def(
          "num_bytes_elsewhere",
          [](const PyMessage& of, RecordFormat format, int64_t rank) {
            const Message columns = of.columns(format);
            const RouteView route = of.route->view();
            int64_t total = 0;
            for (int64_t owner = 0; owner < of.route->num_ranks(); ++owner)
              for (int64_t i = route.first[owner]; owner != rank && i < route.first[owner + 1]; ++i)
                total += columns.row_bytes(route.order[i], format);
            return total;
          },
          py::arg("format"), py::arg("rank"), "Bytes in records for owners other than `rank`.");
  py::class_<ShardArrays>(m, "ShardArrays", "A shard of this node: clock (n,), the arrays (n, width) of a row.")
      .def(py::init([](Array<int32_t> clock, std::vector<Array<float>> arrays, const Directory* directory,
                       const RowFile* file) { return ShardArrays{clock, arrays, directory, file}; }),
           py::arg("clock").noconvert(), py::arg("arrays"), py::arg("directory").none(false), py::arg("file") = nullptr,
           py::keep_alive<1, 4>(), py::keep_alive<1, 5>());

  py::class_<PyRoundServer>(m, "RoundServer", "The owners' side of a table's round (cpp/wire/round.h).")
      .def(py::init<PyPushApplier*, size_t, const std::vector<ShardArrays>&, const std::vector<RoundServer::Rings>&,
                    RecordFormat, const std::vector<Array<int64_t>>&>(),
           py::arg("applier").none(true), py::arg("own"), py::arg("shards"), py::arg("rings"), py::arg("format"),
           py::arg("applied"), py::keep_alive<1, 2>(), py::keep_alive<1, 4>(), py::keep_alive<1, 5>(),
           py::keep_alive<1, 7>())
      .def("has_applied", &PyRoundServer::has_applied, py::arg("step"),
           "Whether the owners of the node have applied so many steps.");
}

}  // namespace hetmpi
