// Messages: pipes of a window and its thread, the server, the exchange between nodes, the owners' side of a table.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "python/arrays.h"
#include "python/bindings.h"
#include "python/shard_arrays.h"
#include "wire/exchange.h"
#include "wire/pipe.h"
#include "wire/request.h"
#include "wire/window_thread.h"

namespace hetmpi {
namespace {

// On memory (capacity,) int64, which the caller keeps alive.
class PyPipeWriter {
 public:
  explicit PyPipeWriter(Array<int64_t> memory) : core_(memory.mutable_data(), memory.shape(0)) {}

  int64_t write(const Array<int64_t>& message, int64_t begin) {
    check_shape(message, "message", {-1});
    if (begin < 0 || begin > message.shape(0)) throw std::out_of_range("pipe: begin must lie in the message");
    const int64_t *words = message.data() + begin, n = message.shape(0) - begin;
    py::gil_scoped_release release;
    return core_.write(words, n);
  }

  int64_t head() const { return core_.head(); }
  void set_tail(int64_t tail) { core_.set_tail(tail); }

 private:
  PipeWriter core_;
};

class PyPipeReader {
 public:
  explicit PyPipeReader(Array<int64_t> memory) : core_(memory.mutable_data(), memory.shape(0)) {}

  py::object read() {
    if (!has_read()) return py::none();
    const std::vector<int64_t>& words = core_.message();
    Array<int64_t> message(static_cast<ssize_t>(words.size()));
    std::copy(words.begin(), words.end(), message.mutable_data());
    return message;
  }

  int64_t tail() const { return core_.tail(); }
  int64_t next_words() const { return core_.next_words(); }

 private:
  bool has_read() {
    py::gil_scoped_release release;
    return core_.read();
  }

  PipeReader core_;
};

// The replies that are made: a client's place and a message, each.
std::vector<std::tuple<size_t, Array<int64_t>>> proceed(Server& server) {
  std::vector<std::pair<size_t, Words>> replies;
  {
    py::gil_scoped_release release;
    server.proceed();
    Words reply;
    for (size_t i = 0; i < server.num_clients(); ++i)
      while (server.take(i, &reply)) replies.emplace_back(i, std::move(reply));
  }
  std::vector<std::tuple<size_t, Array<int64_t>>> found;
  for (auto& [client, words] : replies) found.emplace_back(client, array_of(std::move(words)));
  return found;
}

class PyWindowThread {
 public:
  // memory: of all pipes; a client's requests, then its replies, each a header and a ring of `capacity` words.
  PyWindowThread(Server* server, Array<uint8_t> memory, int64_t capacity)
      : core_(server, pipes_in(memory, capacity, server->num_clients()), capacity) {}

  void stop() {
    py::gil_scoped_release release;
    core_.stop();
  }

  void check() const { core_.check(); }

 private:
  static std::vector<WindowThread::Pipes> pipes_in(Array<uint8_t>& memory, int64_t capacity, size_t num_clients) {
    const int64_t pipe = sizeof(PipeHeader) + capacity * kWord;
    if (memory.shape(0) < static_cast<int64_t>(2 * num_clients) * pipe)
      throw std::invalid_argument("windows: too little memory for the pipes of all clients");
    std::vector<WindowThread::Pipes> clients;
    for (size_t i = 0; i < num_clients; ++i) {
      uint8_t* begin = memory.mutable_data() + 2 * i * pipe;
      clients.push_back({reinterpret_cast<PipeHeader*>(begin), reinterpret_cast<PipeHeader*>(begin + pipe)});
    }
    return clients;
  }

  WindowThread core_;
};

void bind_pipe(py::module_& m) {
  m.attr("PIPE_HEADER_BYTES") = sizeof(PipeHeader);
  m.attr("PIPE_ALIGN_WORDS") = kFrameWords;
  py::class_<PyPipeWriter>(m, "PipeWriter", "The writer's end of a pipe (cpp/wire/pipe.h).")
      .def(py::init<Array<int64_t>>(), as_is("memory"), py::keep_alive<1, 2>())
      .def("write", &PyPipeWriter::write, as_is("message"), "begin"_a,
           "Writes words of a message (n,) int64 from `begin` on, as many as there is room for; returns their number.")
      .def("set_tail", &PyPipeWriter::set_tail, "tail"_a)
      .def_property_readonly("head", &PyPipeWriter::head, "Words written.");
  py::class_<PyPipeReader>(m, "PipeReader", "The reader's end of a pipe (cpp/wire/pipe.h).")
      .def(py::init<Array<int64_t>>(), as_is("memory"), py::keep_alive<1, 2>())
      .def("read", &PyPipeReader::read, "The next message (n,) int64, None if it is not whole.")
      .def_property_readonly("tail", &PyPipeReader::tail, "Words taken.")
      .def_property_readonly("next_words", &PyPipeReader::next_words,
                             "Words of the next frame, as far as it is known, otherwise 0.");
  py::class_<Server>(m, "Server", "Takes the messages of clients and makes the replies (cpp/wire/server.h).")
      .def(py::init<std::vector<int64_t>, int64_t, bool>(), "ranks"_a, "own"_a, "in_rounds"_a,
           "ranks: of the clients; own: this rank; in_rounds: whether all ranks make the same calls.")
      .def(
          "length_of",
          [](Server& of, const Array<int64_t>& begin) {
            const int64_t *words = begin.data(), n = begin.size();
            py::gil_scoped_release release;
            return of.length_of(words, n);
          },
          as_is("begin"), "Words of the message that begins with these (n,) int64; None if they are too few to tell.")
      .def(
          "put",
          [](Server& of, size_t client, Array<int64_t> message) {
            Words words = words_in(std::move(message));
            py::gil_scoped_release release;
            of.put(client, std::move(words));
          },
          "client"_a, as_is("message"),
          "A message (n,) int64 of the client at this place, which must not be changed any more.")
      .def("proceed", &proceed, "Applies and answers what can be; returns (client's place, reply) of each.");
  py::class_<PyWindowThread>(m, "WindowThread", "Serves the pipes of a window (cpp/wire/window_thread.h).")
      .def(py::init<Server*, Array<uint8_t>, int64_t>(), "server"_a, as_is("memory"), "capacity"_a,
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("stop", &PyWindowThread::stop, "Ends the thread.")
      .def("check", &PyWindowThread::check, "Raises the error that has ended the thread.");
}

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

void bind_exchange(py::module_& m) {
  m.attr("REQUEST_TAG") = kRequestTag;
  m.attr("REPLY_TAG") = kReplyTag;
  m.attr("POST_TAG") = kPostTag;

  py::class_<Channel>(m, "Channel", "One table's part of the messages (cpp/wire/exchange.h).")
      .def(py::init([](TableServer* server, std::vector<Ranks> owners, RecordFormat format, std::vector<int64_t> dims,
                       bool is_exact, bool is_collective) {
             return Channel{nullptr, server, std::move(owners), format, std::move(dims), is_exact, is_collective};
           }),
           "server"_a, "owners"_a, "format"_a, "dims"_a, "is_exact"_a, "is_collective"_a, py::keep_alive<1, 2>(),
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
          "route"_a, as_is("out"),
          "Copies the first rows (n, dim) of a Route's keys, all of other nodes, to their positions in out.");

  py::class_<PyExchange>(m, "Exchange", "The messages of several tables between nodes (cpp/wire/exchange.h).")
      .def(py::init<py::handle, py::handle, Server*, Ranks, Ranks>(), "world"_a, "wire"_a, "server"_a, "servers"_a,
           "clients"_a, py::keep_alive<1, 4>(),
           "world and wire: kept by the caller as long. servers: of this rank; clients: those whose messages this rank "
           "receives itself.")
      .def(
          "join", [](PyExchange& of, Channel* channel) { of.core.join(channel); }, "channel"_a, WithoutGil(),
          "Adds a channel. REQUIRES: no message is under way, on any rank.")
      .def(
          "remove", [](PyExchange& of, const Channel* channel) { return of.core.remove(channel); }, "channel"_a,
          WithoutGil(), "Removes a channel, unless it is the last one; returns whether it was not.")
      .def(
          "awaits", [](const PyExchange& of, const Channel* channel) { return of.core.awaits(channel); }, "channel"_a,
          "Whether replies to a channel are not received yet.")
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

void bind_table_server(py::module_& m) {
  using Shards = std::vector<ShardArrays*>;
  const auto server_of = [](const NodeRows& node, std::vector<TableServer::Rings> rings, RecordFormat format,
                            const Shards& applied) {
    std::vector<const int64_t*> steps;
    for (ShardArrays* of : applied) steps.push_back(of->applied());
    return TableServer(&node, std::move(rings), format, std::move(steps));
  };
  py::class_<TableServer>(m, "TableServer", "One table's part of the server (cpp/wire/request.h).")
      .def(py::init(server_of), "node"_a, "rings"_a, "format"_a, "applied"_a, py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>(), py::keep_alive<1, 5>(), "applied: at s = 0 the shards of the node.");
}

}  // namespace

void bind_wire(py::module_& m) {
  bind_table_server(m);
  bind_pipe(m);
  bind_exchange(m);
}

}  // namespace hetmpi
