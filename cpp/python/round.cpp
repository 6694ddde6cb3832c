// RoundRequest and RoundServer: the messages of a table between nodes.
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

namespace hetmpi {
namespace {

using Owners = std::vector<std::vector<int64_t>>;  // of each node

// Messages to `num` partners, to be filled: the number of words of each table's section, then the sections.
// lengths[table][partner], empty for a table that takes no part. Returns the messages, for each table the begin of its
// section in each message, and the number of words of all.
py::tuple new_messages(const std::vector<std::vector<int64_t>>& lengths, size_t num) {
  const auto num_tables = static_cast<int64_t>(lengths.size());
  std::vector<std::vector<int64_t>> begins(num_tables);
  py::list messages;
  int64_t num_words = 0;
  for (size_t i = 0; i < num; ++i) {
    int64_t end = num_tables;
    for (int64_t table = 0; table < num_tables; ++table) {
      begins[table].push_back(end);
      end += lengths[table].empty() ? 0 : lengths[table].at(i);
    }
    Array<int64_t> message(end);
    for (int64_t table = 0; table < num_tables; ++table)
      message.mutable_data()[table] = lengths[table].empty() ? 0 : lengths[table][i];
    messages.append(std::move(message));
    num_words += end;
  }
  return py::make_tuple(messages, begins, num_words);
}

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

  const std::vector<int64_t>& words() const { return words_; }

  // The requests to node i, at word begins[i] of messages[i].
  void write(std::vector<Array<int64_t>> messages, const std::vector<int64_t>& begins) const {
    std::vector<uint8_t*> places;
    for (size_t i = 0; i < owners_.size(); ++i)
      places.push_back(place_in(messages.at(i), begins.at(i), words_[i] * kWord));
    py::gil_scoped_release release;
    for (size_t i = 0; i < owners_.size(); ++i) core_.write(owners_[i], places[i]);
  }

  // After write(): frees their memory before the replies are here.
  void forget_pushes() {
    core_.forget_pushes();
    pushes_.clear();
  }

  void read_clocks(const std::vector<Section>& replies, Array<int32_t> versions, Array<bool> fetched) const {
    if (!known_) throw std::invalid_argument("round: a request without clocks gets no clocks");
    check_shape(versions, "versions", {num_});
    check_shape(fetched, "fetched", {num_});
    const std::vector<Bytes> found = all_bytes(replies);
    int32_t* clocks = versions.mutable_data();
    bool* mask = fetched.mutable_data();
    py::gil_scoped_release release;
    for (size_t i = 0; i < owners_.size(); ++i)
      core_.read_clocks(owners_[i], found.at(i).at, found[i].size, clocks, mask);
  }

  void place(const std::vector<Section>& replies, std::vector<Array<float>> outs) const {
    std::vector<float*> places;
    for (size_t a = 0; a < dims_.size(); ++a) {
      check_shape(outs.at(a), "out", {num_, dims_[a]});
      places.push_back(outs[a].mutable_data());
    }
    const std::vector<Bytes> found = all_bytes(replies);
    py::gil_scoped_release release;
    for (size_t i = 0; i < owners_.size(); ++i) core_.place(owners_[i], found.at(i).at, found[i].size, places);
  }

 private:
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
};

}  // namespace

void bind_round(py::module_& m) {
  m.attr("PUSHES") = kPushes;
  m.def("new_messages", &new_messages, py::arg("lengths"), py::arg("num"),
        "Messages to `num` partners, to be filled; the begin of each table's section in each; the words of all.");
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
      .def("words", &PyRoundRequest::words, "Words of 8 bytes of the request to each node.")
      .def("write", &PyRoundRequest::write, py::arg("messages"), py::arg("begins"))
      .def("forget_pushes", &PyRoundRequest::forget_pushes, "Frees the pushes, which are written.")
      .def("read_clocks", &PyRoundRequest::read_clocks, py::arg("replies"), py::arg("versions").noconvert(),
           py::arg("fetched").noconvert())
      .def("place", &PyRoundRequest::place, py::arg("replies"), py::arg("outs"),
           "Copies the rows in replies to their positions.");
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
