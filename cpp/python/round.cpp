// The rows of a node, and the owners' side of a table's messages.
#include "wire/round.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "python/arrays.h"
#include "python/bindings.h"
#include "python/push_applier.h"
#include "python/shard_arrays.h"

namespace hetmpi {

void bind_round(py::module_& m) {
  py::class_<ShardArrays>(m, "ShardArrays", "A shard of this node.")
      .def(py::init<Array<float>, Array<float>, Array<float>, Array<int32_t>, Array<int64_t>, Array<uint8_t>,
                    const Directory*, RowFile*, std::optional<Array<uint8_t>>>(),
           py::arg("weight").noconvert(), py::arg("state").noconvert(), py::arg("mean_square").noconvert(),
           py::arg("clock").noconvert(), py::arg("applied").noconvert(), py::arg("rings").noconvert(),
           py::arg("directory").none(false), py::arg("file"), py::arg("touched").noconvert(), py::keep_alive<1, 8>(),
           py::keep_alive<1, 9>(),
           "As of Shard in hetmpi/owner/store.py, touched of this rank's own, else None; file: has weight and state, "
           "which have no rows then.")
      .def_property_readonly("weight", &ShardArrays::weight);
  using Shards = std::vector<ShardArrays*>;
  const auto rows_of = [](const Shards& shards, std::vector<int64_t> ranks, int64_t own, bool has_states,
                          PyPushApplier* applier) {
    std::vector<NodeShard> views;
    for (const ShardArrays* shard : shards) views.push_back(shard->view(has_states));
    std::vector<int64_t> dims{shards.at(0)->dim()};
    if (has_states) dims.push_back(1);
    return NodeRows(std::move(views), std::move(ranks), own, std::move(dims), applier ? &applier->core() : nullptr);
  };
  py::class_<NodeRows>(m, "NodeRows", "The shards of all owners of a node (cpp/owner/node_rows.h).")
      .def(py::init(rows_of), py::arg("shards"), py::arg("ranks"), py::arg("own"), py::arg("has_states"),
           py::arg("applier").none(true), py::keep_alive<1, 2>(), py::keep_alive<1, 6>(),
           "ranks: of the owners, ascending. has_states: whether mean squares are read with the rows. applier: writes "
           "the "
           "shard of rank `own`, None at s = 0.")
      .def_property_readonly("dims", &NodeRows::dims, "Numbers of each array of a row.");
  const auto server_of = [](const NodeRows& node, std::vector<RoundServer::Rings> rings, RecordFormat format,
                            const Shards& applied) {
    std::vector<const int64_t*> steps;
    for (ShardArrays* of : applied) steps.push_back(of->applied());
    return RoundServer(&node, std::move(rings), format, std::move(steps));
  };
  py::class_<RoundServer>(m, "RoundServer", "The owners' side of a table's round (cpp/wire/round.h).")
      .def(py::init(server_of), py::arg("node"), py::arg("rings"), py::arg("format"), py::arg("applied"),
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 5>(),
           "applied: at s = 0 the shards of the node.");
}

}  // namespace hetmpi
