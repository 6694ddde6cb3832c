// RoundRequest and RoundServer: the messages of a table between nodes.
#include "wire/round.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/arrays.h"
#include "python/bindings.h"
#include "python/push_applier.h"
#include "python/wire_arrays.h"

namespace hetmpi {
namespace {

using Owners = std::vector<std::vector<int64_t>>;  // of each node

// The part of a message for one table: words [begin, end) of an int64 array.
using Section = std::tuple<Array<int64_t>, int64_t, int64_t>;

struct Bytes {
  const uint8_t* at;
  int64_t size;
};

Bytes bytes_of(const Section& section) {
  const auto& [message, begin, end] = section;
  if (begin < 0 || begin > end || end > message.shape(0))
    throw std::out_of_range("round: a section exceeds its message");
  return {reinterpret_cast<const uint8_t*>(message.data() + begin), (end - begin) * kWord};
}

std::vector<Bytes> all_bytes(const std::vector<Section>& sections) {
  std::vector<Bytes> found;
  for (const Section& section : sections) found.push_back(bytes_of(section));
  return found;
}

uint8_t* place_in(Array<int64_t>& message, int64_t begin, int64_t num_bytes) {
  if (begin < 0 || begin * kWord + num_bytes > message.nbytes())
    throw std::out_of_range("round: a section exceeds its message");
  return reinterpret_cast<uint8_t*>(message.mutable_data() + begin);
}

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
  // num: number of positions. known: None if the request does not judge.
  PyRoundRequest(Owners owners, RouteArrays pull, int64_t num, std::optional<Array<int32_t>> known, int64_t reason,
                 int64_t bound, std::vector<PushArrays> pushes, RecordFormat format, std::vector<int64_t> dims)
      : owners_(std::move(owners)),
        pull_(std::move(pull)),
        num_(num),
        known_(std::move(known)),
        pushes_(std::move(pushes)),
        dims_(dims),
        core_(checked(), known_ ? known_->data() : nullptr, {reason, bound}, views(pushes_, format), format, dims) {
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

  void read_clocks(const std::vector<Section>& replies, Array<int32_t> versions, Array<bool> fetched) const {
    if (!known_) throw std::invalid_argument("round: a request that does not judge gets no clocks");
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
    pull_.check(num_);
    return pull_.view();
  }

  static std::vector<PushView> views(const std::vector<PushArrays>& pushes, RecordFormat format) {
    std::vector<PushView> found;
    for (const PushArrays& push : pushes) found.push_back(push.view(format));
    return found;
  }

  Owners owners_;
  RouteArrays pull_;
  int64_t num_;
  std::optional<Array<int32_t>> known_;
  std::vector<PushArrays> pushes_;
  std::vector<int64_t> dims_;
  RoundRequest core_;
  std::vector<int64_t> words_;  // of the request to each node
};

struct ShardArrays {
  Array<int32_t> clock;
  std::vector<Array<float>> arrays;  // of a row
  const Directory* directory;
};

class PyRoundServer {
 public:
  using Rings = std::vector<std::optional<RingArrays>>;  // None where there is none

  PyRoundServer(PyPushApplier* applier, int64_t own, const std::vector<ShardArrays>& shards, const Owners& owners,
                const std::vector<std::vector<Rings>>& rings, RecordFormat format, bool judges)
      : core_(applier ? &applier->core() : nullptr, own, views(shards), checked(owners, shards.size()), views(rings),
              format, dims_of(shards.at(own)), judges) {}

  // The reason of each request. clients: which of the clients sent it.
  std::vector<int64_t> take(const std::vector<int64_t>& clients, const std::vector<Section>& requests) {
    std::vector<int64_t> reasons;
    for (size_t i = 0; i < requests.size(); ++i) {
      const Bytes request = bytes_of(requests[i]);
      reasons.push_back(RoundServer::header_of(request.at, request.size).reason);
      core_.take(clients.at(i), request.at, request.size);
    }
    return reasons;
  }

  bool apply() {
    py::gil_scoped_release release;
    return core_.apply();
  }

  bool is_applied() const { return core_.is_applied(); }

  std::vector<int64_t> reply_words() {
    py::gil_scoped_release release;
    std::vector<int64_t> sizes = core_.reply_bytes();
    for (int64_t& size : sizes) size /= kWord;
    return sizes;
  }

  void write_replies(std::vector<Array<int64_t>> messages, const std::vector<int64_t>& begins,
                     const std::vector<int64_t>& words) {
    std::vector<uint8_t*> places;
    for (size_t i = 0; i < words.size(); ++i)
      places.push_back(place_in(messages.at(i), begins.at(i), words[i] * kWord));
    py::gil_scoped_release release;
    for (size_t i = 0; i < places.size(); ++i) core_.write_reply(i, places[i]);
    core_.clear();
  }

  void clear() { core_.clear(); }

 private:
  static std::vector<int64_t> dims_of(const ShardArrays& shard) {
    std::vector<int64_t> dims;
    for (const auto& array : shard.arrays) dims.push_back(array.shape(1));
    return dims;
  }

  static std::vector<NodeShard> views(const std::vector<ShardArrays>& shards) {
    std::vector<NodeShard> found;
    for (const ShardArrays& shard : shards) {
      std::vector<const float*> arrays;
      for (const auto& array : shard.arrays) {
        check_shape(array, "array", {shard.clock.shape(0), -1});
        arrays.push_back(array.data());
      }
      found.push_back({shard.clock.data(), arrays, shard.directory});
    }
    return found;
  }

  static const Owners& checked(const Owners& owners, size_t num_shards) {
    for (const auto& of_client : owners) check_in(of_client.data(), of_client.size(), num_shards, "owners");
    return owners;
  }

  static std::vector<std::vector<RoundServer::Rings>> views(const std::vector<std::vector<Rings>>& rings) {
    std::vector<std::vector<RoundServer::Rings>> found;
    for (const auto& of_client : rings) {
      found.emplace_back();
      for (const Rings& of_record : of_client) {
        RoundServer::Rings& views = found.back().emplace_back();
        for (const auto& ring : of_record) views.push_back(ring ? ring->view() : NodeRing{});
      }
    }
    return found;
  }

  RoundServer core_;
};

}  // namespace

void bind_round(py::module_& m) {
  m.def("new_messages", &new_messages, py::arg("lengths"), py::arg("num"),
        "Messages to `num` partners, to be filled; the begin of each table's section in each; the words of all.");
  py::class_<RouteArrays>(m, "RouteArrays", "The arrays of a Route (hetmpi/comm/route.py).")
      .def(py::init([](Array<int64_t> order, Array<int64_t> keys, Array<int64_t> first) {
             return RouteArrays{order, keys, first};
           }),
           py::arg("order").noconvert(), py::arg("keys").noconvert(), py::arg("first").noconvert());
  py::class_<PushArrays>(m, "PushArrays", "The arrays of a Message (hetmpi/comm/mailbox.py).")
      .def(py::init([](int64_t step, RouteArrays route, Array<float> values, std::optional<Array<int32_t>> clocks,
                       std::optional<Array<int32_t>> counts, std::optional<Array<int32_t>> steps,
                       bool ends_step) { return PushArrays{step, route, values, clocks, counts, steps, ends_step}; }),
           py::arg("step"), py::arg("route"), py::arg("values").noconvert(), py::arg("clocks").noconvert(),
           py::arg("counts").noconvert(), py::arg("steps").noconvert(), py::arg("ends_step"));
  py::class_<ShardArrays>(m, "ShardArrays", "A shard of this node: clock (n,), and the arrays (n, width) of a row.")
      .def(py::init([](Array<int32_t> clock, std::vector<Array<float>> arrays, const Directory* directory) {
             return ShardArrays{clock, arrays, directory};
           }),
           py::arg("clock").noconvert(), py::arg("arrays"), py::arg("directory").none(false), py::keep_alive<1, 4>());
  py::class_<RingArrays>(m, "RingArrays",
                         "A ring in this node's memory, or None, and the producer of it or its mirror.")
      .def(py::init(
               [](std::optional<Array<uint8_t>> memory, Producer* producer) { return RingArrays{memory, producer}; }),
           py::arg("memory").noconvert(), py::arg("producer"));

  py::class_<PyRoundRequest>(m, "RoundRequest", "The requester's side of a table's round (cpp/wire/round.h).")
      .def(py::init<Owners, RouteArrays, int64_t, std::optional<Array<int32_t>>, int64_t, int64_t,
                    std::vector<PushArrays>, RecordFormat, std::vector<int64_t>>(),
           py::arg("owners"), py::arg("pull"), py::arg("num"), py::arg("known").noconvert(), py::arg("reason"),
           py::arg("bound"), py::arg("pushes"), py::arg("format"), py::arg("dims"))
      .def("words", &PyRoundRequest::words, "Words of 8 bytes of the request to each node.")
      .def("write", &PyRoundRequest::write, py::arg("messages"), py::arg("begins"))
      .def("read_clocks", &PyRoundRequest::read_clocks, py::arg("replies"), py::arg("versions").noconvert(),
           py::arg("fetched").noconvert())
      .def("place", &PyRoundRequest::place, py::arg("replies"), py::arg("outs"));
  py::class_<PyRoundServer>(m, "RoundServer", "The owners' side of a table's round (cpp/wire/round.h).")
      .def(py::init<PyPushApplier*, int64_t, const std::vector<ShardArrays>&, const Owners&,
                    const std::vector<std::vector<PyRoundServer::Rings>>&, RecordFormat, bool>(),
           py::arg("applier").none(true), py::arg("own"), py::arg("shards"), py::arg("owners"), py::arg("rings"),
           py::arg("format"), py::arg("judges"), py::keep_alive<1, 2>(), py::keep_alive<1, 4>(), py::keep_alive<1, 6>())
      .def("take", &PyRoundServer::take, py::arg("clients"), py::arg("requests"),
           "Takes requests; returns the reason of each.")
      .def("apply", &PyRoundServer::apply, "Applies or passes on all pushes; False: a ring is full, call again.")
      .def("is_applied", &PyRoundServer::is_applied, "Whether the owners have applied all pushes passed on.")
      .def("reply_words", &PyRoundServer::reply_words, "Words of 8 bytes of the reply to each request.")
      .def("write_replies", &PyRoundServer::write_replies, py::arg("messages"), py::arg("begins"), py::arg("words"))
      .def("clear", &PyRoundServer::clear, "Forgets the requests taken, where none gets a reply.");
}

}  // namespace hetmpi
