// Exchange, Channel: the messages of several tables, on a wire and in a world that are Python's.
#include "wire/exchange.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "python/arrays.h"
#include "python/bindings.h"
#include "python/wire_arrays.h"

namespace hetmpi {
namespace {

// The core runs without the GIL, which these take. They borrow their objects, which Python's Exchange keeps, so that
// Python sees all references between them.

// hetmpi/wire/wire.py, Wire.
class PyWire : public Wire {
 public:
  explicit PyWire(py::handle wire) : wire_(wire) {}

  void send(int64_t tag, std::vector<Addressed> messages) override {
    py::gil_scoped_acquire acquire;
    py::dict by_partner;
    for (Addressed& message : messages) by_partner[py::int_(message.partner)] = array_of(std::move(message.words));
    wire_.attr("send")(tag, by_partner);
  }

  void expect(int64_t tag, const Ranks& partners) override {
    py::gil_scoped_acquire acquire;
    wire_.attr("expect")(tag, partners);
  }

  std::vector<Addressed> arrived(int64_t tag, const Ranks& partners) override {
    py::gil_scoped_acquire acquire;
    const py::dict found = wire_.attr("arrived")(tag, partners);
    std::vector<Addressed> messages;
    for (const auto& [partner, message] : found)
      messages.push_back({partner.cast<int64_t>(), words_in(message.cast<Array<int64_t>>())});
    return messages;
  }

  bool publish() override {
    py::gil_scoped_acquire acquire;
    return wire_.attr("publish")().cast<bool>();
  }

 private:
  py::handle wire_;
};

// hetmpi/world/world.py, World.
class PyWaits : public Waits {
 public:
  explicit PyWaits(py::handle world) : world_(world), pauses_(py::hasattr(world, "pause")) {}

  void wait(const std::function<bool()>& look, const std::function<Awaited()>& what) override {
    if (look()) return;
    py::gil_scoped_acquire acquire;
    const auto looks = [&look] {
      py::gil_scoped_release release;
      return look();
    };
    const auto text = [&what] {
      const Awaited awaited = what();
      return py::str(awaited.text)
          .attr("format")(py::module_::import("hetmpi.world.waiting").attr("ranks_text")(awaited.ranks));
    };
    world_.attr("wait")(py::cpp_function(looks), py::cpp_function(text));
  }

  void pause() override {
    if (!pauses_) return;
    py::gil_scoped_acquire acquire;
    world_.attr("pause")();
  }

 private:
  py::handle world_;
  bool pauses_;  // of a simulation
};

class PyExchange {
 public:
  PyExchange(py::handle world, py::handle wire, Server* server, Ranks servers, Ranks clients)
      : waits_(world), wire_(wire), core(&waits_, &wire_, server, std::move(servers), std::move(clients)) {}

 private:
  PyWaits waits_;
  PyWire wire_;

 public:
  Exchange core;
};

}  // namespace

void bind_exchange(py::module_& m) {
  using WithoutGil = py::call_guard<py::gil_scoped_release>;
  m.attr("REQUEST_TAG") = kRequestTag;
  m.attr("REPLY_TAG") = kReplyTag;
  m.attr("POST_TAG") = kPostTag;

  py::class_<Channel>(m, "Channel", "One table's part of the messages (cpp/wire/exchange.h).")
      .def(py::init([](RoundServer* server, std::vector<Ranks> owners, RecordFormat format, std::vector<int64_t> dims,
                       bool is_exact, bool is_collective) {
             return Channel{nullptr, server, std::move(owners), format, std::move(dims), is_exact, is_collective};
           }),
           py::arg("server"), py::arg("owners"), py::arg("format"), py::arg("dims"), py::arg("is_exact"),
           py::arg("is_collective"), py::keep_alive<1, 2>(),
           "owners: on the node of each server; dims: of the arrays of a row in a reply.")
      .def_readonly("is_exact", &Channel::is_exact, "Whether the table is read at s = 0.")
      .def_readonly("is_collective", &Channel::is_collective,
                    "Whether all ranks must make the same calls in the same order.")
      .def(
          "fetch",
          [](const Channel& of, std::shared_ptr<Route> route, Array<float> out) {
            check_shape(out, "out", {route->num_positions(), of.dims.at(0)});
            float* rows = out.mutable_data();
            py::gil_scoped_release release;
            fetch(of, route, 0, rows);
          },
          py::arg("route"), py::arg("out").noconvert(),
          "Copies the first rows (n, dim) of a Route's keys, all of other nodes, to their positions in out.");

  py::class_<PyExchange>(m, "Exchange", "The messages of several tables between nodes (cpp/wire/exchange.h).")
      .def(py::init<py::handle, py::handle, Server*, Ranks, Ranks>(), py::arg("world"), py::arg("wire"),
           py::arg("server"), py::arg("servers"), py::arg("clients"), py::keep_alive<1, 4>(),
           "world and wire: kept by the caller as long. servers: of this rank; clients: those whose messages this rank "
           "receives itself.")
      .def(
          "join", [](PyExchange& of, Channel* channel) { of.core.join(channel); }, py::arg("channel"), WithoutGil(),
          "Adds a channel. REQUIRES: no message is under way, on any rank.")
      .def(
          "remove", [](PyExchange& of, const Channel* channel) { return of.core.remove(channel); }, py::arg("channel"),
          WithoutGil(), "Removes a channel, unless it is the last one; returns whether it was not.")
      .def(
          "awaits", [](const PyExchange& of, const Channel* channel) { return of.core.awaits(channel); },
          py::arg("channel"), "Whether replies to a channel are not received yet.")
      .def(
          "check", [](const PyExchange& of) { of.core.check(); },
          "Raises RuntimeError if an error has ended the messages.")
      .def(
          "poll", [](PyExchange& of) { return of.core.poll(); }, WithoutGil(),
          "Lets messages leave, and receives and answers those of clients. Returns whether all that this rank has sent "
          "have come from each client too.")
      .def(
          "receive_all", [](PyExchange& of) { of.core.receive_all(); }, WithoutGil(),
          "Receives all replies that are awaited.")
      .def_property_readonly(
          "is_broken", [](const PyExchange& of) { return of.core.is_broken(); },
          "An error, or different calls of ranks, has ended the messages: none is awaited any more.")
      .def_property_readonly(
          "num_messages", [](const PyExchange& of) { return of.core.num_messages(); }, "Sent so far.")
      .def_property_readonly("num_bytes", [](const PyExchange& of) { return of.core.num_bytes(); }, "Of these.");
}

}  // namespace hetmpi
