// Exchange, Channel, Request: the messages of several tables, on a wire and in a world that are Python's.
#include "wire/exchange.h"

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
  explicit PyWaits(py::handle world) : world_(world) {}

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

 private:
  py::handle world_;
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

std::shared_ptr<Request> request_of(const Channel& channel, int64_t reason, std::shared_ptr<const Route> route,
                                    int64_t step, std::optional<Array<int32_t>> known, int64_t bound,
                                    const std::vector<PyMessage>& pushes, std::optional<Array<int32_t>> versions) {
  const ssize_t n = route->num_positions();
  std::optional<std::vector<int32_t>> clocks;
  int32_t* owners_clocks = nullptr;
  std::shared_ptr<const void> memory;
  if (known) {
    check_shape(*known, "known", {n});
    if (!versions) throw std::invalid_argument("a request with `known` needs `versions`");
    check_shape(*versions, "versions", {n});
    clocks.emplace(known->data(), known->data() + n);
    owners_clocks = versions->mutable_data();
    memory = kept(std::move(*versions));
  }
  std::vector<Push> pushed;
  for (const PyMessage& push : pushes) {
    const std::shared_ptr<const PyMessage> message = kept(push);
    pushed.push_back({message->view(channel.format), message});
  }
  return std::make_shared<Request>(channel, RequestHeader{reason, bound, step}, std::move(route), std::move(clocks),
                                   std::move(pushed), owners_clocks, std::move(memory));
}

void place(Request& request, std::vector<Array<float>> outs) {
  const std::vector<int64_t>& dims = request.channel().dims;
  std::vector<float*> places;
  for (size_t a = 0; a < dims.size(); ++a) {
    check_shape(outs.at(a), "out", {request.num_positions(), dims[a]});
    places.push_back(outs[a].mutable_data());
  }
  py::gil_scoped_release release;
  request.place(places);
}

}  // namespace

void bind_exchange(py::module_& m) {
  using WithoutGil = py::call_guard<py::gil_scoped_release>;
  m.attr("PUSHES") = kPushes;
  m.attr("REQUEST_TAG") = kRequestTag;
  m.attr("REPLY_TAG") = kReplyTag;
  m.attr("POST_TAG") = kPostTag;

  py::class_<Channel>(m, "Channel", "One table's part of the messages (cpp/wire/exchange.h).")
      .def(py::init([](PyRoundServer* server, std::vector<Ranks> owners, RecordFormat format, std::vector<int64_t> dims,
                       bool is_exact) {
             return Channel{nullptr, &server->core(), std::move(owners), format, std::move(dims), is_exact};
           }),
           py::arg("server"), py::arg("owners"), py::arg("format"), py::arg("dims"), py::arg("is_exact"),
           py::keep_alive<1, 2>(), "owners: on the node of each server; dims: of the arrays of a row in a reply.")
      .def_readonly("is_exact", &Channel::is_exact, "Whether the table is read at s = 0.");

  py::class_<Request, std::shared_ptr<Request>>(
      m, "Request", "What a table asks of the owners on other nodes, and their replies (cpp/wire/exchange.h).")
      .def(
          py::init(&request_of), py::arg("channel"), py::arg("reason"), py::arg("route"), py::arg("step") = 0,
          py::arg("known").noconvert() = py::none(), py::arg("bound") = 0, py::arg("pushes") = std::vector<PyMessage>(),
          py::arg("versions").noconvert() = py::none(), py::keep_alive<1, 2>(),
          "route: the requested keys, at their positions in a batch of n. step: at s = 0, the steps that the rows must "
          "have. At s >= 1 known (n,) int32: the clock of this rank's copy of each row, NO_LINE if it has no usable "
          "one; bound: how far an owner's clock may be ahead of it without a need for the row; versions (n,) int32: "
          "gets the owners' clocks. pushes: Messages, which the owners apply first. Nothing given is to be changed.")
      .def_property_readonly("step", &Request::step)
      .def_property_readonly("num_bytes", &Request::num_bytes, "Of the rows that the replies bring.")
      .def_property_readonly(
          "fetched",
          [](const py::object& self) {
            const auto& mask = self.cast<const Request&>().fetched();
            return Array<bool>(mask.size(), reinterpret_cast<const bool*>(mask.data()), self);
          },
          "The rows that the replies bring, once they are received: (n,) bool; at s = 0 empty, as they bring all.")
      .def(
          "serve", [](const Request& of) { of.exchange().serve(of.round()); }, WithoutGil(),
          "Answers the requests of other ranks in this round, if no thread does.")
      .def(
          "receive", [](const Request& of) { of.exchange().receive(of.round()); }, WithoutGil(),
          "Waits for the replies.")
      .def("place", &place, py::arg("outs"),
           "Copies the rows to their positions: an out (n, width) float32 for each array of a row.")
      .def("drop", [](const Request& of) { of.exchange().drop(of); }, WithoutGil(), "Ends it in any state.");

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
          "ask", [](PyExchange& of, const Exchange::Requests& requests) { of.core.ask(requests); }, py::arg("requests"),
          WithoutGil(), "Sends every server Requests, of some channels. Raises as check().")
      .def(
          "post", [](PyExchange& of, const Exchange::Requests& requests) { of.core.post(requests); },
          py::arg("requests"), WithoutGil(),
          "Sends every server gradients, and what Requests ask that are for another reason than PUSHES. All ranks post "
          "equally often.")
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
