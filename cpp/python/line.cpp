// LineWriter, LineReader, WindowThread: the wire by one-sided calls; Server.
#include "wire/line.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "python/arrays.h"
#include "python/bindings.h"
#include "python/wire_arrays.h"
#include "wire/window_thread.h"

namespace hetmpi {
namespace {

// On memory (capacity,) int64, which the caller keeps alive.
class PyLineWriter {
 public:
  explicit PyLineWriter(Array<int64_t> memory) : core_(memory.mutable_data(), memory.shape(0)) {}

  int64_t write(const Array<int64_t>& message, int64_t begin) {
    check_shape(message, "message", {-1});
    if (begin < 0 || begin > message.shape(0)) throw std::out_of_range("line: begin must lie in the message");
    const int64_t *words = message.data() + begin, n = message.shape(0) - begin;
    py::gil_scoped_release release;
    return core_.write(words, n);
  }

  int64_t head() const { return core_.head(); }
  void set_tail(int64_t tail) { core_.set_tail(tail); }

 private:
  LineWriter core_;
};

class PyLineReader {
 public:
  explicit PyLineReader(Array<int64_t> memory) : core_(memory.mutable_data(), memory.shape(0)) {}

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

  LineReader core_;
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
  // memory: of all lines; a client's requests, then its replies, each a header and a ring of `capacity` words.
  PyWindowThread(Server* server, Array<uint8_t> memory, int64_t capacity)
      : core_(server, lines_in(memory, capacity, server->num_clients()), capacity) {}

  void stop() {
    py::gil_scoped_release release;
    core_.stop();
  }

  void check() const { core_.check(); }

 private:
  static std::vector<WindowThread::Lines> lines_in(Array<uint8_t>& memory, int64_t capacity, size_t num_clients) {
    const int64_t line = sizeof(LineHeader) + capacity * kWord;
    if (memory.shape(0) < static_cast<int64_t>(2 * num_clients) * line)
      throw std::invalid_argument("windows: too little memory for the lines of all clients");
    std::vector<WindowThread::Lines> clients;
    for (size_t i = 0; i < num_clients; ++i) {
      uint8_t* begin = memory.mutable_data() + 2 * i * line;
      clients.push_back({reinterpret_cast<LineHeader*>(begin), reinterpret_cast<LineHeader*>(begin + line)});
    }
    return clients;
  }

  WindowThread core_;
};

}  // namespace

void bind_line(py::module_& m) {
  m.attr("LINE_HEADER_BYTES") = sizeof(LineHeader);
  m.attr("LINE_ALIGN_WORDS") = kFrameWords;
  py::class_<PyLineWriter>(m, "LineWriter", "The writer's end of a line (cpp/wire/line.h).")
      .def(py::init<Array<int64_t>>(), py::arg("memory").noconvert(), py::keep_alive<1, 2>())
      .def("write", &PyLineWriter::write, py::arg("message").noconvert(), py::arg("begin"),
           "Writes words of a message (n,) int64 from `begin` on, as many as there is room for; returns their number.")
      .def("set_tail", &PyLineWriter::set_tail, py::arg("tail"))
      .def_property_readonly("head", &PyLineWriter::head, "Words written.");
  py::class_<PyLineReader>(m, "LineReader", "The reader's end of a line (cpp/wire/line.h).")
      .def(py::init<Array<int64_t>>(), py::arg("memory").noconvert(), py::keep_alive<1, 2>())
      .def("read", &PyLineReader::read, "The next message (n,) int64, None if it is not whole.")
      .def_property_readonly("tail", &PyLineReader::tail, "Words taken.")
      .def_property_readonly("next_words", &PyLineReader::next_words,
                             "Words of the next frame, as far as it is known, otherwise 0.");
  py::class_<Server>(m, "Server", "Takes the messages of clients and makes the replies (cpp/wire/server.h).")
      .def(py::init<std::vector<int64_t>, int64_t, bool>(), py::arg("ranks"), py::arg("own"), py::arg("in_rounds"),
           "ranks: of the clients; own: this rank; in_rounds: whether all ranks make the same calls.")
      .def(
          "length_of",
          [](Server& of, const Array<int64_t>& begin) {
            const int64_t *words = begin.data(), n = begin.size();
            py::gil_scoped_release release;
            return of.length_of(words, n);
          },
          py::arg("begin").noconvert(),
          "Words of the message that begins with these (n,) int64; None if they are too few to tell.")
      .def(
          "put",
          [](Server& of, size_t client, Array<int64_t> message) {
            Words words = words_in(std::move(message));
            py::gil_scoped_release release;
            of.put(client, std::move(words));
          },
          py::arg("client"), py::arg("message").noconvert(),
          "A message (n,) int64 of the client at this place, which must not be changed any more.")
      .def("proceed", &proceed, "Applies and answers what can be; returns (client's place, reply) of each.");
  py::class_<PyWindowThread>(m, "WindowThread", "Serves the lines of a window (cpp/wire/window_thread.h).")
      .def(py::init<Server*, Array<uint8_t>, int64_t>(), py::arg("server"), py::arg("memory").noconvert(),
           py::arg("capacity"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("stop", &PyWindowThread::stop, "Ends the thread.")
      .def("check", &PyWindowThread::check, "Raises the error that has ended the thread.");
}

}  // namespace hetmpi
