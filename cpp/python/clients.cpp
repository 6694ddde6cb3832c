// The clients of both consistency models, and what they are made of: keys, the rows of a node, tables.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "client/bounded.h"
#include "client/exact.h"
#include "client/keys.h"
#include "python/arrays.h"
#include "python/bindings.h"
#include "python/lines.h"
#include "python/push_applier.h"
#include "python/shard_arrays.h"
#include "python/wire_arrays.h"

namespace hetmpi {
namespace {

using Mask = Array<bool>;
using PyKeys = std::shared_ptr<Keys>;

std::vector<uint8_t> ranks_in(const Mask& mask, const Partition& partition) {
  check_shape(mask, "a mask of ranks", {static_cast<ssize_t>(partition.size())});
  return {mask.data(), mask.data() + mask.size()};
}

PyKeys keys_of(const KeySpace& space, const py::object& tensor, const Array<int64_t>& values) {
  const int64_t *key = values.data(), n = values.size();
  std::shared_ptr<const void> identity(kept(tensor), tensor.ptr());
  py::gil_scoped_release release;
  return std::make_shared<Keys>(space, key, n, std::move(identity));
}

// Keys that were checked last, at most so many. Used with the GIL, by several threads.
class RecentKeys {
 public:
  explicit RecentKeys(size_t most) : most_(most) {}

  size_t most() const { return most_; }
  void set_most(size_t most) { most_ = most; }

  void add(PyKeys keys) {
    kept_.push_back(std::move(keys));
    while (kept_.size() > most_) {
      const PyKeys oldest = std::move(kept_.front());
      kept_.pop_front();  // before its end, which may run Python
    }
  }

  // Those of this tensor, if it still has their values; else null.
  PyKeys find(const py::object& tensor) const {
    std::vector<PyKeys> found;  // numpy() may let another thread add keys
    for (const PyKeys& keys : kept_)
      if (keys->identity.get() == tensor.ptr()) found.push_back(keys);
    if (found.empty()) return nullptr;
    const auto values = Array<int64_t>::ensure(tensor.attr("numpy")());
    for (const PyKeys& keys : found)
      if (values && keys->has_values(values.data(), values.size())) return keys;
    return nullptr;
  }

 private:
  size_t most_;
  std::deque<PyKeys> kept_;
};

std::vector<KeysOfCall> calls_of(const std::vector<PyKeys>& keys) {
  for (const PyKeys& of : keys)
    if (!of) throw std::invalid_argument("a client takes Keys, got None");
  return {keys.begin(), keys.end()};
}

template <typename Client>
void check_clients(const std::vector<Client*>& clients) {
  for (const Client* of : clients)
    if (of == nullptr) throw std::invalid_argument("a call takes clients, got None");
}

// Gradients (n, dim) for n keys.
void check_rows(const py::object& grads, const Keys& keys) {
  if (grads.attr("size")(0).cast<int64_t>() != keys.size())
    throw std::invalid_argument("gradients must have a row for each key");
}

// The verbs of a client: static calls on several of them. grads_of(tensor, keys, table): gradients as write() takes
// them.
template <typename Client, typename Bind, typename GradsOf>
void bind_verbs(Bind& bind, GradsOf grads_of) {
  using Clients = std::vector<Client*>;
  bind.def_static(
          "read",
          [](const Clients& clients, const std::vector<PyKeys>& keys) {
            check_clients(clients);
            const auto keys_of_call = calls_of(keys);
            std::vector<ModelRows> rows;
            {
              py::gil_scoped_release release;
              rows = Client::read(clients, keys_of_call);
            }
            py::list tensors;
            for (size_t i = 0; i < rows.size(); ++i)
              tensors.append(object_of(rows[i], clients[i]->table().lines->form().dim));
            return tensors;
          },
          py::arg("clients"), py::arg("keys"),
          "Keys -> rows (n, dim) float32 on each table's device, as recent as the consistency model requires.")
      .def_static(
          "announce",
          [](const Clients& clients, const std::vector<PyKeys>& keys) {
            check_clients(clients);
            Client::announce(clients, calls_of(keys));
          },
          py::arg("clients"), py::arg("keys"), py::call_guard<py::gil_scoped_release>(),
          "Announces the Keys of a later read.")
      .def_static(
          "write",
          [grads_of](const Clients& clients, const std::vector<PyKeys>& keys, const std::vector<py::object>& grads) {
            check_clients(clients);
            const auto keys_of_call = calls_of(keys);
            std::vector<decltype(grads_of(grads[0], *keys[0], clients[0]->table()))> rows;
            for (size_t i = 0; i < clients.size(); ++i) {
              check_rows(grads.at(i), *keys.at(i));
              rows.push_back(grads_of(grads[i], *keys[i], clients[i]->table()));
            }
            py::gil_scoped_release release;
            Client::write(clients, keys_of_call, rows);
          },
          py::arg("clients"), py::arg("keys"), py::arg("grads"),
          "Pushes gradients (n, dim) of each table's Keys, or keeps them pending for a later push.")
      .def(
          "peek",
          [](const Client& client, const PyKeys& keys) {
            const int64_t dim = client.table().lines->form().dim;
            const Array<float> rows({static_cast<ssize_t>(keys->size()), static_cast<ssize_t>(dim)});
            float* out = const_cast<float*>(rows.data());
            {
              py::gil_scoped_release release;
              client.peek(*keys, out);
            }
            return rows;
          },
          py::arg("keys").none(false),
          "The owners' rows (n, dim), for evaluation; neither lines nor counters are used.")
      .def("resume_at", &Client::resume_at, py::arg("step"), py::call_guard<py::gil_scoped_release>(),
           "Continues as after `step` steps.")
      .def_property_readonly("step", &Client::step, "Steps written so far (at s = 0: and settled).");
}

void bind_keys(py::module_& m) {
  py::class_<Keys, PyKeys>(m, "Keys", "Keys of a call, checked (cpp/client/keys.h).")
      .def("__len__", &Keys::size)
      .def_property_readonly(
          "array", [](const Keys& of) { return array_of(of.array); }, "Their values: (n,) int64.")
      .def_property_readonly("route", [](const Keys& of) { return of.route; }, "Their owners.");
  py::class_<KeySpace>(m, "KeySpace", "The keys of a table, as one rank sees them (cpp/client/keys.h).")
      .def(py::init(
               [](const Partition& partition, int64_t rank, const Mask& remote, const Mask& admitted, Lines* lines) {
                 return KeySpace{partition, rank, ranks_in(remote, partition), ranks_in(admitted, partition), lines};
               }),
           py::arg("partition"), py::arg("rank"), py::arg("remote_ranks").noconvert(),
           py::arg("admitted_ranks").noconvert(), py::arg("lines"), py::keep_alive<1, 6>(),
           "Masks (size,) bool of the ranks on other nodes, and of those whose rows may be cached.")
      .def("keys", &keys_of, py::arg("tensor"), py::arg("values").noconvert(),
           "Keys of values (n,) int64. tensor: identifies the batch. Raises IndexError for a key that is not in the "
           "table. Thread-safe.");
  py::class_<RecentKeys>(m, "RecentKeys", "Keys that were checked last.")
      .def(py::init<size_t>(), py::arg("most"))
      .def_property("most", &RecentKeys::most, &RecentKeys::set_most, "How many are kept.")
      .def("add", &RecentKeys::add, py::arg("keys"))
      .def("find", &RecentKeys::find, py::arg("tensor"), "Those of this tensor, None if its values are others now.");
}

// Gradients at s = 0: in host memory, finite. Those of a GPU are waited for.
Buffer<float> exact_grads(const py::object& grads, const Keys& keys, const Table& table) {
  const InPart push(*table.spans, kPush);
  const Lines::Form& form = table.lines->form();
  Buffer<float> rows = host_rows_of(grads.attr("cpu")(), form.dim);
  if (form.computes_beside)
    py::module_::import("hetmpi.table.client")
        .attr("check_finite")(array_of(keys.array),
                              array_of(rows, {static_cast<ssize_t>(keys.size()), static_cast<ssize_t>(form.dim)}));
  return rows;
}

void bind_exact(py::module_& m) {
  py::class_<ExactClient> bind(m, "ExactClient", "One rank's side of a table at s = 0 (cpp/client/exact.h).");
  bind.def(py::init([](const Table& table, ShardArrays& shard, const RowOptimizer& rule, ExactClient::Rate rate) {
             StepReducer reducer(shard.ends({shard.dim(), false}), table.rank(), shard.core(), shard.applied());
             return new ExactClient(table, std::move(reducer), rule, std::move(rate));
           }),
           py::arg("table"), py::arg("shard"), py::arg("rule"), py::arg("rate"),
           "shard: this rank's. rate: learning rate of a step, counted from 0. The caller keeps what is given.");
  bind_verbs<ExactClient>(bind, &exact_grads);
  bind.def_static(
          "settle",
          [](const std::vector<ExactClient*>& clients) {
            check_clients(clients);
            ExactClient::settle(clients);
          },
          py::arg("clients"), py::call_guard<py::gil_scoped_release>(),
          "Applies the gradients of all ranks' last write, without a barrier.")
      .def("check_write", &ExactClient::check_write, "Raises RuntimeError unless write() may be called now.")
      .def("receive_all", &ExactClient::receive_all, py::call_guard<py::gil_scoped_release>())
      .def("receive_pending", &ExactClient::receive_pending, py::call_guard<py::gil_scoped_release>(),
           "Takes the gradients that have arrived, while this rank waits for others.")
      .def_property_readonly("is_written", &ExactClient::is_written, "Whether a write is not settled yet.")
      .def_property_readonly("num_ahead", &ExactClient::num_ahead, "Batches announced and not read.");
}

void bind_bounded(py::module_& m) {
  py::class_<BoundedClient> bind(m, "BoundedClient", "One rank's side of a table at s >= 1 (cpp/client/bounded.h).");
  bind.def(py::init([](const Table& table, PyPushApplier* owner, const RowOptimizer& rule, BoundedClient::Rates rates,
                       int64_t bound, size_t batches_per_pull, float anticipate) {
             const BoundedClient::Settings settings{bound, batches_per_pull, anticipate};
             return new BoundedClient(table, &owner->core(), rule, std::move(rates), settings);
           }),
           py::arg("table"), py::arg("owner"), py::arg("rule"), py::arg("rates"), py::arg("bound"),
           py::arg("batches_per_pull"), py::arg("anticipate"),
           "owner: applies pushes to this rank's shard. rates: learning rates of a step, counted from 0, and of some "
           "that follow. The caller keeps what is given.");
  bind_verbs<BoundedClient>(
      bind, [](const py::object& grads, const Keys&, const Table& table) { return rows_of(grads, *table.lines); });
  bind.def("send_all", &BoundedClient::send_all, py::call_guard<py::gil_scoped_release>(),
           "Sends all pending gradients of this rank to their owners and waits until they are applied.")
      .def("await_owners", &BoundedClient::await_owners, py::call_guard<py::gil_scoped_release>(),
           "Waits until the owners have applied the gradients that this rank has pushed.")
      .def("drop_all", &BoundedClient::drop_all, py::call_guard<py::gil_scoped_release>(),
           "Ends the transfers for announced batches, which may still be read.")
      .def("set_rates", &BoundedClient::set_rates, py::call_guard<py::gil_scoped_release>(),
           "Tells the owner's side this rank's step.")
      .def(
          "check_write", [](const BoundedClient&) {}, "No effect.")
      .def_property_readonly("num_held", &BoundedClient::num_held, "Messages with gradients held for other nodes.")
      .def_property_readonly(
          "last_read",
          [](const BoundedClient& of) {
            const Batch* last = of.last();
            if (last == nullptr) throw std::runtime_error("nothing was read yet");
            return py::make_tuple(array_of(last->slots), array_of(last->clocks));
          },
          "Slots and clocks (n,) of the keys of the last read.");
}

}  // namespace

void bind_clients(py::module_& m) {
  m.attr("MOST_AHEAD") = kMostAhead;
  bind_keys(m);
  py::class_<Table>(m, "Table", "What the client of a table uses (cpp/client/client.h).")
      .def(py::init([](const KeySpace* space, const NodeRows* node, Channel* channel, Lines* lines, Spans* spans,
                       Counters* counters, std::vector<RingProducer*> rings) {
             if (rings.size() != static_cast<size_t>(space->partition.size()))
               throw std::invalid_argument("a table takes a ring, or None, for each rank");
             return Table{space, node, channel, lines, spans, counters, std::move(rings)};
           }),
           py::arg("space"), py::arg("node"), py::arg("channel"), py::arg("lines"), py::arg("spans"),
           py::arg("counters"), py::arg("rings"),
           "rings: of each rank, to another owner of this node, else None. The caller keeps what is given.");
  bind_exact(m);
  bind_bounded(m);
}

}  // namespace hetmpi
