// RoundRequest, RoundServer, Message: what a table sends between nodes.
#include "wire/round.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "python/arrays.h"
#include "python/bindings.h"
#include "python/round_server.h"
#include "python/wire_arrays.h"
#include "wire/sections.h"

namespace hetmpi {
namespace {

using Owners = std::vector<std::vector<int64_t>>;  // of each node

class PyRoundRequest {
 public:
  // known: None if the request has no clocks.
  PyRoundRequest(Owners owners, std::shared_ptr<const Route> pull, std::optional<Array<int32_t>> known, int64_t reason,
                 int64_t bound, int64_t step, std::vector<PyMessage> pushes, RecordFormat format,
                 std::vector<int64_t> dims)
      : owners_(std::move(owners)),
        pull_(std::move(pull)),
        num_(pull_->num_positions()),
        known_(std::move(known)),
        pushes_(std::move(pushes)),
        dims_(dims),
        core_(checked(), known_ ? known_->data() : nullptr, {reason, bound, step}, views(pushes_, format), format,
              dims) {
    for (const auto& owners : owners_) words_.push_back(core_.bytes(owners) / kWord);
  }

  // A message to each node, of the requests of several tables; null for a table that takes no part.
  static std::vector<Array<int64_t>> messages_of(const std::vector<const PyRoundRequest*>& requests, size_t num_nodes) {
    std::vector<Array<int64_t>> messages;
    std::vector<uint8_t*> places;  // of each section
    for (size_t node = 0; node < num_nodes; ++node) {
      std::vector<int64_t> lengths;
      for (const PyRoundRequest* request : requests) lengths.push_back(request ? request->words_.at(node) : 0);
      auto& message = messages.emplace_back(message_words(lengths.data(), static_cast<int64_t>(lengths.size())));
      int64_t* const words = message.mutable_data();
      for (const int64_t begin : write_lengths(lengths, words))
        places.push_back(reinterpret_cast<uint8_t*>(words + begin));
    }
    py::gil_scoped_release release;
    for (size_t node = 0, i = 0; node < num_nodes; ++node)
      for (const PyRoundRequest* request : requests) {
        if (request) request->core_.write(request->owners_[node], places[i]);
        ++i;
      }
    return messages;
  }

  // After messages_of(): frees their memory before the replies are here.
  void forget_pushes() {
    core_.forget_pushes();
    pushes_.clear();
  }

  // Gives each table its part of the replies of all nodes; requests: as of messages_of().
  static void set_replies(const std::vector<PyRoundRequest*>& requests, const std::vector<Array<int64_t>>& messages) {
    for (PyRoundRequest* request : requests)
      if (request) request->replies_.clear();
    for (const Array<int64_t>& message : messages) {
      const auto sections = sections_of(message.data(), message.size(), static_cast<int64_t>(requests.size()));
      for (size_t table = 0; table < requests.size(); ++table)
        if (requests[table]) requests[table]->replies_.push_back({sections[table], message});
    }
  }

  void read_clocks(Array<int32_t> versions, Array<bool> fetched) const {
    if (!known_) throw std::invalid_argument("round: a request without clocks gets no clocks");
    check_shape(versions, "versions", {num_});
    check_shape(fetched, "fetched", {num_});
    int32_t* clocks = versions.mutable_data();
    bool* mask = fetched.mutable_data();
    py::gil_scoped_release release;
    for (size_t i = 0; i < owners_.size(); ++i)
      core_.read_clocks(owners_[i], bytes_of(i), kWord * replies_.at(i).section.num_words, clocks, mask);
  }

  // Frees the replies.
  void place(std::vector<Array<float>> outs) {
    std::vector<float*> places;
    for (size_t a = 0; a < dims_.size(); ++a) {
      check_shape(outs.at(a), "out", {num_, dims_[a]});
      places.push_back(outs[a].mutable_data());
    }
    {
      py::gil_scoped_release release;
      for (size_t i = 0; i < owners_.size(); ++i)
        core_.place(owners_[i], bytes_of(i), kWord * replies_.at(i).section.num_words, places);
    }
    replies_.clear();
  }

 private:
  struct Reply {
    Section section;         // this table's part
    Array<int64_t> message;  // which has it
  };

  const uint8_t* bytes_of(size_t node) const { return reinterpret_cast<const uint8_t*>(replies_.at(node).section.at); }

  RouteView checked() const {
    if (known_) check_shape(*known_, "known", {num_});
    return pull_->view();
  }

  static std::vector<PushView> views(const std::vector<PyMessage>& pushes, RecordFormat format) {
    std::vector<PushView> found;
    for (const PyMessage& push : pushes) found.push_back(push.view(format));
    return found;
  }

  Owners owners_;
  std::shared_ptr<const Route> pull_;
  int64_t num_;
  std::optional<Array<int32_t>> known_;
  std::vector<PyMessage> pushes_;
  std::vector<int64_t> dims_;
  RoundRequest core_;
  std::vector<int64_t> words_;  // of the request to each node
  std::vector<Reply> replies_;  // of each node
};

}  // namespace

void bind_round(py::module_& m) {
  m.attr("PUSHES") = kPushes;
  m.def(
      "message_words",
      [](const Array<int64_t>& piece, int64_t num_tables) -> std::optional<int64_t> {
        if (piece.size() < num_tables) return std::nullopt;
        return message_words(piece.data(), num_tables);
      },
      py::arg("piece").noconvert(), py::arg("num_tables"),
      "Words of the message that begins with this piece (n,) int64; None if the piece does not say it.");
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

  py::class_<PyRoundRequest>(m, "RoundRequest", "The requester's side of a table's round (cpp/wire/round.h).")
      .def(py::init<Owners, std::shared_ptr<const Route>, std::optional<Array<int32_t>>, int64_t, int64_t, int64_t,
                    std::vector<PyMessage>, RecordFormat, std::vector<int64_t>>(),
           py::arg("owners"), py::arg("pull"), py::arg("known").noconvert(), py::arg("reason"), py::arg("bound"),
           py::arg("step"), py::arg("pushes"), py::arg("format"), py::arg("dims"))
      .def_static("messages_of", &PyRoundRequest::messages_of, py::arg("requests"), py::arg("num_nodes"),
                  "A message (n,) int64 to each node, of the requests of several tables, None for one without.")
      .def("forget_pushes", &PyRoundRequest::forget_pushes, "Frees the pushes, which are written.")
      .def_static("set_replies", &PyRoundRequest::set_replies, py::arg("requests"), py::arg("messages"),
                  "Gives each of the requests, as of messages_of(), its part of the replies of all nodes.")
      .def("read_clocks", &PyRoundRequest::read_clocks, py::arg("versions").noconvert(), py::arg("fetched").noconvert(),
           "Sets the owners' clocks of the requested keys (n,) int32, and which rows came (n,) bool.")
      .def("place", &PyRoundRequest::place, py::arg("outs"),
           "Copies the rows to their positions: an out (n, width) float32 for each array of a row.");
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
