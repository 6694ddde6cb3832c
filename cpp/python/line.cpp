// LineWriter, LineReader, Server: the wire by one-sided calls.
#include "wire/line.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "python/arrays.h"
#include "python/bindings.h"
#include "python/round_server.h"
#include "wire/server.h"

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

class PyServer {
 public:
  // memory: of all lines; a client's requests, then its replies, each a header and a ring of `capacity` words.
  PyServer(Array<uint8_t> memory, int64_t capacity) : core_(lines_in(memory, capacity), capacity) {}

  void serve(const std::vector<PyRoundServer*>& tables) {
    std::vector<RoundServer*> cores;
    for (PyRoundServer* table : tables) cores.push_back(table ? &table->core() : nullptr);
    py::gil_scoped_release release;
    core_.serve(std::move(cores));
  }

  void stop() {
    py::gil_scoped_release release;
    core_.stop();
  }

  void check() { core_.check(); }

 private:
  static std::vector<Server::Lines> lines_in(Array<uint8_t>& memory, int64_t capacity) {
    const int64_t line = sizeof(LineHeader) + capacity * kWord;
    std::vector<Server::Lines> clients;
    for (int64_t at = 0; at + 2 * line <= memory.shape(0); at += 2 * line) {
      uint8_t* begin = memory.mutable_data() + at;
      clients.push_back({reinterpret_cast<LineHeader*>(begin), reinterpret_cast<LineHeader*>(begin + line)});
    }
    return clients;
  }

  Server core_;
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
  py::class_<PyServer>(m, "Server", "Answers requests from a thread (cpp/wire/server.h).")
      .def(py::init<Array<uint8_t>, int64_t>(), py::arg("memory").noconvert(), py::arg("capacity"),
           py::keep_alive<1, 2>())
      .def("serve", &PyServer::serve, py::arg("tables"),
           "tables: RoundServers, in the order of their sections; None for one that has left.")
      .def("stop", &PyServer::stop, "Ends the thread.")
      .def("check", &PyServer::check, "Raises the error that has ended the service.");
}

}  // namespace hetmpi
