// hetmpi._C: the only file that knows Python. Checks dtypes and shapes, releases the GIL, calls the core.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <sched.h>

#include <chrono>
#include <cstring>
#include <optional>
#include <string>

#include "inbox.h"
#include "key_index.h"
#include "ring.h"
#include "row_init.h"
#include "row_optimizer.h"
#include "shard.h"

namespace py = pybind11;
using py::ssize_t;

namespace hetmpi {
namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

std::string shape_of(const py::array& array) {
  std::string text = "(";
  for (ssize_t i = 0; i < array.ndim(); ++i) text += (i ? ", " : "") + std::to_string(array.shape(i));
  return text + (array.ndim() == 1 ? ",)" : ")");
}

// Raises ValueError unless `array` has the given shape; -1 admits any length.
void check_shape(const py::array& array, const char* name, std::initializer_list<ssize_t> shape) {
  bool matches = array.ndim() == static_cast<ssize_t>(shape.size());
  ssize_t axis = 0;
  std::string expected = "(";
  for (ssize_t length : shape) {
    matches = matches && (length < 0 || array.shape(axis) == length);
    expected += (axis++ ? ", " : "") + (length < 0 ? std::string("*") : std::to_string(length));
  }
  if (!matches)
    throw std::invalid_argument(std::string(name) + " must have shape " + expected + "), got " + shape_of(array));
}

void check_in(const int64_t* values, ssize_t n, int64_t limit, const char* name) {
  for (ssize_t i = 0; i < n; ++i)
    if (values[i] < 0 || values[i] >= limit)
      throw std::out_of_range(std::string(name) + " must lie in [0, " + std::to_string(limit) + "), got " +
                              std::to_string(values[i]));
}

py::tuple unique(const Array<int64_t>& ids) {
  check_shape(ids, "ids", {-1});
  const ssize_t n = ids.shape(0);
  Array<int64_t> index(n);
  static thread_local KeyIndex seen;
  {
    const int64_t* in = ids.data();
    int64_t* out = index.mutable_data();
    py::gil_scoped_release release;
    seen.clear(n);
    for (ssize_t i = 0; i < n; ++i) out[i] = seen.number(in[i]);
  }
  Array<int64_t> keys(seen.size());
  std::copy(seen.keys().begin(), seen.keys().end(), keys.mutable_data());
  return py::make_tuple(keys, index);
}

void init_rows(Array<float> weight, const Array<int64_t>& keys, uint64_t seed, float std) {
  check_shape(weight, "weight", {keys.shape(0), -1});
  const ssize_t n = keys.shape(0), dim = weight.shape(1);
  float* out = weight.mutable_data();
  const int64_t* key = keys.data();
  py::gil_scoped_release release;
  for (ssize_t i = 0; i < n; ++i) init_row(out + i * dim, dim, key[i], seed, std);
}

// out[order[i]] = weight[rows[i]]
void gather(const Array<float>& weight, const Array<int64_t>& rows, Array<float> out, const Array<int64_t>& order) {
  const ssize_t n = rows.shape(0), dim = weight.shape(1);
  check_shape(order, "order", {n});
  check_shape(out, "out", {-1, dim});
  const float* from = weight.data();
  const int64_t *row = rows.data(), *position = order.data();
  float* to = out.mutable_data();
  const ssize_t num_rows = weight.shape(0), num_out = out.shape(0);
  py::gil_scoped_release release;
  check_in(row, n, num_rows, "rows");
  check_in(position, n, num_out, "order");
  constexpr ssize_t kAhead = 8;  // rows prefetched: a shard is far larger than the caches
  for (ssize_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(from + row[i + kAhead] * dim);
    std::memcpy(to + position[i] * dim, from + row[i] * dim, dim * sizeof(float));
  }
}

Shard shard_of(Array<float>& weight, Array<float>& state, Array<int64_t>& clock) {
  const ssize_t n = clock.shape(0);
  check_shape(weight, "weight", {n, -1});
  check_shape(state, "state", {n, -1});
  return {weight.mutable_data(), state.mutable_data(), clock.mutable_data(), n, weight.shape(1), state.shape(1)};
}

// Waits by yielding the processor, not by spinning: ranks may outnumber cores.
template <typename Ready>
bool yield_until(Ready ready, double timeout_s) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  while (!ready()) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    sched_yield();
  }
  return true;
}

// The origin's end of one ring, with the arrays it writes kept alive by the caller (see py::keep_alive below).
class Producer {
 public:
  Producer(Array<uint8_t> data, int64_t dim) : ring_(data.mutable_data(), data.size(), dim), dim_(dim) {}

  int64_t write(int64_t step, const Array<int64_t>& rows, const Array<float>& grads, const Array<int64_t>& order,
                int64_t begin, bool is_last) {
    const ssize_t n = rows.shape(0);
    check_shape(order, "order", {n});
    check_shape(grads, "grads", {-1, dim_});
    if (begin < 0 || begin > n) throw std::out_of_range("begin must lie in [0, " + std::to_string(n) + "]");
    const int64_t *row = rows.data() + begin, *position = order.data() + begin;
    const float* grad = grads.data();
    py::gil_scoped_release release;
    return ring_.write(step, row, grad, position, n - begin, is_last);
  }

  uint64_t head() const { return ring_.head(); }
  void set_tail(uint64_t tail) { ring_.set_tail(tail); }

 private:
  RingProducer ring_;
  int64_t dim_;
};

RingHeader* ring_header(Array<uint8_t>& memory) {
  if (memory.size() < static_cast<ssize_t>(sizeof(RingHeader)))
    throw std::invalid_argument("a ring needs at least " + std::to_string(sizeof(RingHeader)) + " bytes");
  return reinterpret_cast<RingHeader*>(memory.mutable_data());
}

uint64_t ring_tail(Array<uint8_t> memory) { return ring_header(memory)->tail.load(std::memory_order_acquire); }

void publish_head(Array<uint8_t> memory, uint64_t head) {
  ring_header(memory)->head.store(head, std::memory_order_release);
}

class PyInbox {
 public:
  PyInbox(Array<uint8_t> rings, int64_t own_rank, Array<float> weight, Array<float> state, Array<int64_t> clock)
      : inbox_(rings.mutable_data(), rings.shape(1), rings.shape(0), own_rank, shard_of(weight, state, clock)),
        dim_(weight.shape(1)) {}

  void begin(int64_t step, Array<int64_t> rows, Array<float> grads) {
    check_shape(grads, "grads", {rows.shape(0), dim_});
    rows_ = rows, grads_ = grads;
    inbox_.begin(step, rows_.data(), grads_.data(), rows_.shape(0));
  }

  bool poll(double timeout_s) {
    py::gil_scoped_release release;
    return yield_until([this] { return inbox_.poll(); }, timeout_s);
  }

  int64_t apply(const RowOptimizer& optimizer) {
    py::gil_scoped_release release;
    return inbox_.apply(optimizer);
  }

  int64_t awaited() const { return inbox_.awaited(); }

 private:
  Inbox inbox_;
  int64_t dim_;
  Array<int64_t> rows_{0};  // of the open step, kept alive
  Array<float> grads_{0};
};

}  // namespace
}  // namespace hetmpi

PYBIND11_MODULE(_C, m) {
  using namespace hetmpi;
  m.doc() = "C++ core of hetmpi: unique keys, rows, row optimizers, rings between ranks.";
  m.attr("has_cuda") = false;
  m.attr("RING_HEADER_BYTES") = sizeof(RingHeader);
  m.def("min_ring_capacity", &min_ring_capacity, py::arg("dim"));

  m.def("unique", &unique, py::arg("ids").noconvert(),
        "ids (N,) int64 -> keys (U,) int64 in order of first appearance, index (N,) int64 with ids == keys[index].");
  m.def("init_rows", &init_rows, py::arg("weight").noconvert(), py::arg("keys").noconvert(), py::arg("seed"),
        py::arg("std"), "weight (n, dim) float32 = std * normal(seed, key, column), for keys (n,) int64.");
  m.def("gather", &gather, py::arg("weight").noconvert(), py::arg("rows").noconvert(), py::arg("out").noconvert(),
        py::arg("order").noconvert(), "out[order[i]] = weight[rows[i]]; float32 rows, int64 rows (n,) and order (n,).");

  py::class_<RowOptimizer>(m, "RowOptimizer")
      .def(py::init<const std::string&, int64_t, float, float, float, float>(), py::arg("rule"), py::arg("dim"),
           py::arg("weight_decay"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"))
      .def_property_readonly("state_dim", &RowOptimizer::state_dim)
      .def("set_step", &RowOptimizer::set_step, py::arg("lr"), py::arg("step"));

  py::class_<Producer>(m, "Producer", "The origin's end of one ring (cpp/ring.h). REQUIRES: order in [0, len(grads)), as Route makes it.")
      .def(py::init<Array<uint8_t>, int64_t>(), py::arg("data").noconvert(), py::arg("dim"), py::keep_alive<1, 2>())
      .def("write", &Producer::write, py::arg("step"), py::arg("rows").noconvert(), py::arg("grads").noconvert(),
           py::arg("order").noconvert(), py::arg("begin"), py::arg("is_last"))
      .def("set_tail", &Producer::set_tail, py::arg("tail"))
      .def_property_readonly("head", &Producer::head);
  m.def("ring_tail", &ring_tail, py::arg("memory").noconvert());
  m.def("publish_head", &publish_head, py::arg("memory").noconvert(), py::arg("head"));

  py::class_<PyInbox>(m, "Inbox", "The owner's side of one synchronous step (cpp/inbox.h).")
      .def(py::init<Array<uint8_t>, int64_t, Array<float>, Array<float>, Array<int64_t>>(), py::arg("rings").noconvert(),
           py::arg("own_rank"), py::arg("weight").noconvert(), py::arg("state").noconvert(),
           py::arg("clock").noconvert(), py::keep_alive<1, 2>(), py::keep_alive<1, 4>(), py::keep_alive<1, 5>(),
           py::keep_alive<1, 6>())
      .def("begin", &PyInbox::begin, py::arg("step"), py::arg("rows").noconvert(), py::arg("grads").noconvert())
      .def("poll", &PyInbox::poll, py::arg("timeout_s"))
      .def("apply", &PyInbox::apply, py::arg("optimizer"))
      .def_property_readonly("awaited", &PyInbox::awaited);
}
