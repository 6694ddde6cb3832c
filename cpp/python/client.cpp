// Lines in host memory. The clients of both consistency models, and what they are made of: keys and tables.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cache/cache_decisions.h"
#include "cache/row_type.h"
#include "client/bounded.h"
#include "client/exact.h"
#include "client/host_lines.h"
#include "client/keys.h"
#include "owner/row_optimizer.h"
#include "python/arrays.h"
#include "python/bindings.h"
#include "python/shard_arrays.h"
#include "schedule.h"

namespace hetmpi {
namespace {

// Rows and gradients as tensors.

// As a tensor (n, dim), in the same memory: that of the model's processor, if another one computes it.
py::object object_of(const ModelRows& rows, const Lines::Form& form, const py::object& from_numpy) {
  if (form.computes_beside) return *static_cast<const py::object*>(rows.memory.get());
  const Array<float> array({static_cast<ssize_t>(rows.num), static_cast<ssize_t>(form.dim)}, rows.at,
                           owner_of(rows.memory));
  return from_numpy(array);
}

// The numbers of a tensor of this type in host memory; nothing of another object.
template <typename T>
std::optional<Array<T>> numbers_of(const py::object& tensor) {
  try {
    const py::object numbers = tensor.attr("numpy")();
    if (py::isinstance<py::array_t<T, 0>>(numbers)) return numbers.cast<Array<T>>();
  } catch (const py::error_already_set&) {
  }
  return std::nullopt;
}

// The gradients (n, dim) of keys, which are finite, in host memory. Of another object Python makes such a tensor, or
// raises UserError.
ModelRows host_grads(const py::object& tensor, const Keys& keys, const Table& table) {
  const ssize_t n = keys.size(), dim = table.lines->form().dim;
  std::optional<Array<float>> grads = numbers_of<float>(tensor);
  if (!grads || grads->ndim() != 2 || grads->shape(0) != n || grads->shape(1) != dim)
    grads = numbers_of<float>(
        py::module_::import("hetmpi.table.client").attr("checked_gradients")(tensor, py::make_tuple(n, dim), "cpu"));
  const Buffer<float> rows = buffer_of(std::move(*grads));
  refuse_if_not_finite(keys.array.data(), n, rows.data(), dim);
  return {rows.data(), n, rows.memory()};
}

// RowCache's calls on arrays of one batch of n keys: slots (n) int64, clocks (n) int32, chosen (n) bool, weights and
// grads (n, dim), states (n, preview_dim) float32.
class PyHostLines : public HostLines {
 public:
  PyHostLines(int64_t capacity_rows, const RowOptimizer& rule, const std::string& policy, const std::string& rows)
      : HostLines(capacity_rows, rule, policy_of(policy), row_type_of(rows)) {}

  void look_up(const Array<int64_t>& keys, Array<int64_t> slots) {
    check_shape(slots, "slots", {keys.shape(0)});
    const int64_t* key = keys.data();
    int64_t* out = slots.mutable_data();
    const ssize_t n = keys.shape(0);
    py::gil_scoped_release release;
    cache().look_up(key, n, out);
  }

  void use(const Array<int64_t>& slots, int64_t num_keys) { cache().use(slots.data(), checked(slots), num_keys); }

  void refresh(const Array<int64_t>& slots, const Array<bool>& chosen, const Array<float>& weights,
               const Array<float>& states, const Array<int32_t>& clocks, float anticipate) {
    const ssize_t n = check_rows(slots, chosen, weights, states, clocks);
    cache().refresh(slots.data(), reinterpret_cast<const uint8_t*>(chosen.data()), weights.data(), states.data(),
                    clocks.data(), n, anticipate);
  }

  // Lines that it evicts are not counted for the table.
  void insert_and_evict(const Array<int64_t>& keys, const Array<bool>& chosen, const Array<float>& weights,
                        const Array<float>& states, const Array<int32_t>& clocks, Array<int64_t> slots) {
    check_shape(keys, "keys", {check_rows(slots, chosen, weights, states, clocks)});
    const ModelRows rows{const_cast<float*>(weights.data()), weights.shape(0), nullptr};
    insert(buffer_of(keys), buffer_of(chosen), rows, buffer_of(states), buffer_of(clocks), buffer_of(std::move(slots)));
    num_evicted();
  }

  void gather(const Array<int64_t>& slots, Array<float> out) {
    check_shape(out, "out", {checked(slots), cache().dim()});
    cache().gather(slots.data(), slots.shape(0), out.mutable_data());
  }

  void update(const Array<int64_t>& slots, const Array<float>& grads, float anticipate) {
    check_shape(grads, "grads", {checked(slots), cache().dim()});
    cache().update(slots.data(), grads.data(), slots.shape(0), anticipate);
  }

  void take_due(const Array<int64_t>& slots, int64_t staleness) {
    cache().release_due(slots.data(), checked(slots), staleness, &released());
  }

  Array<int32_t> clocks_within(const Array<int64_t>& slots, bool will_write, int64_t staleness) {
    Array<int32_t> clocks(checked(slots));
    cache().clocks_within(slots.data(), slots.shape(0), will_write, staleness, clocks.mutable_data());
    return clocks;
  }

  Array<int32_t> clocks(const Array<int64_t>& slots) {
    Array<int32_t> out(checked(slots));
    for (ssize_t i = 0; i < out.size(); ++i) out.mutable_at(i) = slots.at(i) < 0 ? -1 : cache().clock(slots.at(i));
    return out;
  }

  void forget(const Array<int64_t>& keys) { cache().forget(keys.data(), keys.size()); }

 private:
  ssize_t checked(const Array<int64_t>& slots) {
    check_shape(slots, "slots", {-1});
    check_in(slots.data(), slots.shape(0), cache().num_slots(), "slots", -1);
    return slots.shape(0);
  }

  ssize_t check_rows(const Array<int64_t>& slots, const Array<bool>& chosen, const Array<float>& weights,
                     const Array<float>& states, const Array<int32_t>& clocks) {
    const ssize_t n = checked(slots);
    check_shape(chosen, "chosen", {n});
    check_shape(weights, "weights", {n, cache().dim()});
    check_shape(states, "states", {n, cache().preview_dim()});
    check_shape(clocks, "clocks", {n});
    return n;
  }
};

// Numbers of each entry, in the memory of the sums: (n,), or (n, k).
template <typename Number, typename Values>
auto column(Values ReleasedSums::* values) {
  return [values](const py::object& self) {
    auto& of = self.cast<ReleasedSums&>();
    const auto n = static_cast<ssize_t>(of.keys.size());
    constexpr ssize_t kInValue = sizeof(typename Values::value_type) / sizeof(Number);
    const ssize_t width = n > 0 ? static_cast<ssize_t>((of.*values).size()) / n * kInValue : kInValue;
    std::vector<ssize_t> shape{n};
    if (width > 1 || std::is_same_v<Number, float>) shape.push_back(width);
    return Array<Number>(shape, reinterpret_cast<const Number*>((of.*values).data()), self);
  };
}

void bind_lines(py::module_& m) {
  py::class_<ReleasedSums, std::shared_ptr<ReleasedSums>>(
      m, "ReleasedSums", "Gradient sums of n keys that lines have released (cpp/cache/released_sums.h).")
      .def_property_readonly("keys", column<int64_t>(&ReleasedSums::keys))
      .def_property_readonly("clocks", column<int32_t>(&ReleasedSums::clocks))
      .def_property_readonly("counts", column<int32_t>(&ReleasedSums::counts))
      .def_property_readonly("steps", column<int32_t>(&ReleasedSums::steps), "(n, 2)")
      .def_property_readonly("sums", column<float>(&ReleasedSums::sums), "(n, sum_dim); (0, 1) without any.");
  m.attr("UNBOUNDED") = kUnbounded;
  m.attr("NO_LINE") = kNoLine;
  m.attr("WAYS") = kWays;
  m.attr("LINE_OVERHEAD_BYTES") = RowCache::kLineOverhead;

  py::class_<Lines>(m, "Lines", "The cache of rows, as a client uses it (cpp/client/lines.h).")
      .def_property_readonly("capacity_rows", &Lines::capacity_rows, "Lines; with 0 no key has one.")
      .def_property_readonly(
          "computes_beside", [](const Lines& of) { return of.form().computes_beside; },
          "Whether another processor computes the model, so that the host can prepare the next batch meanwhile.");

  py::class_<PyHostLines, Lines>(m, "HostLines", "Lines in host memory (cpp/client/host_lines.h, cache/row_cache.h).")
      .def(py::init<int64_t, const RowOptimizer&, const std::string&, const std::string&>(), "capacity_rows"_a,
           "rule"_a, "policy"_a, "rows"_a = "float32")
      .def_property_readonly("lags",
                             [](const PyHostLines& of) { return Array<int64_t>(LagHistogram::kBins, of.lags().bins); })
      .def("set_step", &PyHostLines::set_step, "lr"_a, "step"_a)
      .def(
          "set_drift", [](PyHostLines& of, float most, float others) { of.cache().set_drift(most, others); }, "most"_a,
          "others"_a)
      .def("look_up", &PyHostLines::look_up, as_is("keys"), as_is("slots"))
      .def("use", &PyHostLines::use, as_is("slots"), "num_keys"_a)
      .def("refresh", &PyHostLines::refresh, as_is("slots"), as_is("chosen"), as_is("weights"), as_is("states"),
           as_is("clocks"), "anticipate"_a)
      .def("insert_and_evict", &PyHostLines::insert_and_evict, as_is("keys"), as_is("chosen"), as_is("weights"),
           as_is("states"), as_is("clocks"), as_is("slots"))
      .def("gather", &PyHostLines::gather, as_is("slots"), as_is("out"))
      .def("update", &PyHostLines::update, as_is("slots"), as_is("grads"), "anticipate"_a)
      .def("take_due", &PyHostLines::take_due, as_is("slots"), "staleness"_a)
      .def("take_all", &PyHostLines::due_all)
      .def("take", [](PyHostLines& of) { return of.take(false); })
      .def("clocks_within", &PyHostLines::clocks_within, as_is("slots"), "will_write"_a, "staleness"_a)
      .def("forget", &PyHostLines::forget, as_is("keys"))
      .def("clocks", &PyHostLines::clocks, as_is("slots"), "c_c of each line, -1 where there is none.");
  m.def(
      "preview_sums",
      [](const RowOptimizer& rule, const Array<int64_t>& positions, Array<float> weights, Array<float> states,
         Array<int32_t> clocks, Array<float> sums, const Array<int32_t>& counts, Array<int32_t> sum_clocks,
         float anticipate) {
        const ssize_t n = positions.shape(0), num_rows = clocks.shape(0);
        check_in(positions.data(), n, num_rows, "positions", -1);
        check_shape(weights, "weights", {num_rows, rule.dim()});
        check_shape(states, "states", {num_rows, rule.preview_dim()});
        check_shape(sums, "sums", {n, rule.sum_dim()});
        check_shape(counts, "counts", {n});
        check_shape(sum_clocks, "sum_clocks", {n});
        preview_sums(rule, positions.data(), n, sums.mutable_data(), counts.data(), sum_clocks.mutable_data(),
                     anticipate, weights.mutable_data(), states.mutable_data(), clocks.mutable_data());
      },
      "rule"_a, as_is("positions"), as_is("weights"), as_is("states"), as_is("clocks"), as_is("sums"), as_is("counts"),
      as_is("sum_clocks"), "anticipate"_a, "As in cpp/cache/row_cache.h.");
}

using Mask = Array<bool>;
using PyKeys = std::shared_ptr<Keys>;

std::vector<uint8_t> ranks_in(const Mask& mask, const Partition& partition) {
  check_shape(mask, "a mask of ranks", {static_cast<ssize_t>(partition.size())});
  return {mask.data(), mask.data() + mask.size()};
}

struct PyKeySpace : KeySpace {
  RecentKeys recent{0};
};

// Keys of a tensor, checked; null if it has keys that repeat or are not in the table, or something else. Those that
// were checked last are found again, unless they have other values now. are_fixed: the values stay as they are.
// may_repeat: keys for one call, which may.
PyKeys checked_keys(PyKeySpace& space, const py::object& tensor, bool are_fixed, bool may_repeat) {
  std::vector<PyKeys> recent;  // copied: numpy() may let another thread add keys
  if (!may_repeat) recent = space.recent.of_batch(tensor.ptr());
  for (const PyKeys& keys : recent)
    if (keys->are_fixed) return keys;
  const auto values = numbers_of<int64_t>(tensor);
  if (!values || values->ndim() != 1) return nullptr;
  const int64_t *key = values->data(), n = values->size();
  for (const PyKeys& keys : recent)
    if (keys->has_values(key, n)) return keys;
  std::shared_ptr<const void> identity(kept(tensor), tensor.ptr());
  PyKeys keys;
  {
    py::gil_scoped_release release;
    if (!may_repeat && position_of_repeated(key, n) >= 0) return nullptr;
    try {
      keys = std::make_shared<Keys>(space, key, n, std::move(identity));
    } catch (const std::out_of_range&) {
      return nullptr;
    }
  }
  keys->are_fixed = are_fixed;
  if (!may_repeat) space.recent.add(keys);
  return keys;
}

std::vector<PyKeys> check_keys(const std::vector<PyKeySpace*>& spaces, const std::vector<py::object>& tensors,
                               bool are_fixed, bool may_repeat) {
  std::vector<PyKeys> keys;
  for (size_t i = 0; i < spaces.size(); ++i)
    keys.push_back(spaces[i] == nullptr ? nullptr : checked_keys(*spaces[i], tensors.at(i), are_fixed, may_repeat));
  return keys;
}

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

// The verbs of a client: static calls on several of them. grads_of(tensor, keys, client): gradients as write() takes
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
            const py::object from_numpy = py::module_::import("torch").attr("from_numpy");
            for (size_t i = 0; i < rows.size(); ++i)
              tensors.append(object_of(rows[i], clients[i]->table().lines->form(), from_numpy));
            return tensors;
          },
          "clients"_a, "keys"_a,
          "Keys -> rows (n, dim) float32 on each table's device, as recent as the consistency model requires.")
      .def_static(
          "announce",
          [](const Clients& clients, const std::vector<PyKeys>& keys) {
            check_clients(clients);
            Client::announce(clients, calls_of(keys));
          },
          "clients"_a, "keys"_a, WithoutGil(), "Announces the Keys of a later read.")
      .def_static(
          "write",
          [grads_of](const Clients& clients, const std::vector<PyKeys>& keys, const std::vector<py::object>& grads) {
            check_clients(clients);
            const auto keys_of_call = calls_of(keys);
            std::vector<ModelRows> rows;
            {
              const InPart push(*clients.at(0)->table().spans, kPush);
              for (size_t i = 0; i < clients.size(); ++i)
                rows.push_back(grads_of(grads.at(i), *keys.at(i), *clients[i]));
            }
            py::gil_scoped_release release;
            Client::write(clients, keys_of_call, rows);
          },
          "clients"_a, "keys"_a, "grads"_a,
          "Pushes gradients (n, dim) of each table's Keys, or keeps them pending for a later push. Before any leaves, "
          "raises UserError for another shape or dtype, NotFinite for numbers that are not finite.")
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
          "keys"_a.none(false), "The owners' rows (n, dim), for evaluation; neither lines nor counters are used.")
      .def("resume_at", &Client::resume_at, "step"_a, WithoutGil(), "Continues as after `step` steps.")
      .def_property_readonly("step", &Client::step, "Steps written so far (at s = 0: and settled).");
}

void bind_keys(py::module_& m) {
  py::class_<Keys, PyKeys>(m, "Keys", "Keys of a call, checked (cpp/client/keys.h).")
      .def("__len__", &Keys::size)
      .def_property_readonly(
          "array", [](const Keys& of) { return array_of(of.array); }, "Their values: (n,) int64.")
      .def_property_readonly("route", [](const Keys& of) { return of.route; }, "Their owners.");
  py::class_<PyKeySpace>(m, "KeySpace", "The keys of a table, as one rank sees them (cpp/client/keys.h).")
      .def(py::init([](const Partition& partition, int64_t rank, const Mask& remote, const Mask& admitted,
                       Lines* lines) {
             return PyKeySpace{{partition, rank, ranks_in(remote, partition), ranks_in(admitted, partition), lines}};
           }),
           "partition"_a, "rank"_a, as_is("remote_ranks"), as_is("admitted_ranks"), "lines"_a, py::keep_alive<1, 6>(),
           "Masks (size,) bool of the ranks on other nodes, and of those whose rows may be cached.")
      .def(
          "remember", [](PyKeySpace& of, size_t most) { of.recent.set_most(most); }, "most"_a,
          "So many of the batches that check_keys() checked last are found again.")
      .def_property_readonly("num_checked", [](const PyKeySpace& of) { return of.recent.num_added(); });
  m.def("check_keys", &check_keys, "spaces"_a, "tensors"_a, "are_fixed"_a = false, "may_repeat"_a = false,
        "Keys of a tensor (n,) int64 for each table, None for one of another dtype, shape or place, or with keys that "
        "repeat or are not in the table. Tensors that were checked are found again if they have the same values. "
        "are_fixed: they will. may_repeat: keys for one call, which may. Thread-safe.");
}

// Gradients at s = 0: where the device's rows are; else in host memory and finite, for which those of a GPU are waited.
ModelRows exact_grads(const py::object& grads, const Keys& keys, const ExactClient& client) {
  const Table& table = client.table();
  if (client.has_device_rows()) return device_rows_of(grads, keys.size());
  return host_grads(table.lines->form().computes_beside ? grads.attr("cpu")() : grads, keys, table);
}

void bind_schedule(py::module_& m) {
  py::class_<Schedule>(m, "Schedule", "Factor of learning rates over steps (cpp/schedule.h).")
      .def(py::init([](int kind, int64_t warmup_steps, int64_t total_steps, double floor, double decay, int64_t drops) {
             return Schedule{static_cast<Schedule::Kind>(kind), warmup_steps, total_steps, floor, decay, drops};
           }),
           "kind"_a, "warmup_steps"_a, "total_steps"_a, "floor"_a, "decay"_a, "drops"_a,
           "kind: place in Schedule::Kind.")
      .def_readwrite("warmup_steps", &Schedule::warmup_steps)
      .def_readwrite("total_steps", &Schedule::total_steps)
      .def_readwrite("floor", &Schedule::floor)
      .def_readwrite("decay", &Schedule::decay)
      .def_readwrite("drops", &Schedule::drops)
      .def("factor", &Schedule::factor, "step"_a, "Factor of the base learning rate at a step, counted from 0.");
}

void bind_exact(py::module_& m) {
  py::class_<DeviceRows>(m, "DeviceRows", "Rows of a table of one rank where the model is (cpp/client/device_rows.h).");
  py::class_<ExactClient> bind(m, "ExactClient", "One rank's side of a table at s = 0 (cpp/client/exact.h).");
  bind.def(py::init([](const Table& table, ShardArrays& shard, const RowOptimizer& rule, double lr,
                       const Schedule* schedule, DeviceRows* device) {
             StepReducer reducer(shard.ends({shard.dim(), false}), table.rank(), shard.core(), shard.applied());
             const auto rate = [=](int64_t step) { return lr * schedule->factor(step); };
             return new ExactClient(table, std::move(reducer), rule, rate, device);
           }),
           "table"_a, "shard"_a, "rule"_a, "lr"_a, "schedule"_a, "device"_a,
           "shard: this rank's. device: has the rows, None if the shard has them. The caller keeps what is given.");
  bind_verbs<ExactClient>(bind, &exact_grads);
  bind.def_static(
          "apply_written",
          [](const std::vector<ExactClient*>& clients) {
            check_clients(clients);
            ExactClient::apply_written(clients);
          },
          "clients"_a, WithoutGil(), "Applies the gradients of all ranks' last write, without a barrier.")
      .def("receive_all", &ExactClient::receive_all, WithoutGil())
      .def("receive_pending", &ExactClient::receive_pending, WithoutGil(),
           "Takes the gradients that have arrived, while this rank waits for others.")
      .def_property_readonly("is_written", &ExactClient::is_written, "Whether a write is not settled yet.")
      .def_property_readonly("num_ahead", &ExactClient::num_ahead, "Batches announced and not read.");
}

void bind_bounded(py::module_& m) {
  py::class_<BoundedClient> bind(m, "BoundedClient", "One rank's side of a table at s >= 1 (cpp/client/bounded.h).");
  bind.def(
      py::init([](const Table& table, PushApplier* owner, const RowOptimizer& rule, double lr, const Schedule* schedule,
                  int64_t lead, int64_t bound, size_t batches_per_pull, float anticipate) {
        const BoundedClient::Settings settings{bound, batches_per_pull, anticipate};
        const auto rates = [=](int64_t step) {
          std::vector<double> of_steps;
          for (int64_t next = step; next <= step + lead; ++next) of_steps.push_back(lr * schedule->factor(next));
          return of_steps;
        };
        return new BoundedClient(table, owner, rule, rates, settings);
      }),
      "table"_a, "owner"_a, "rule"_a, "lr"_a, "schedule"_a, "lead"_a, "bound"_a, "batches_per_pull"_a, "anticipate"_a,
      "owner: applies pushes to this rank's shard. lead: steps by which another rank may be ahead. The caller "
      "keeps what is given.");
  bind_verbs<BoundedClient>(bind, [](const py::object& grads, const Keys& keys, const BoundedClient& client) {
    const Table& table = client.table();
    return table.lines->form().computes_beside ? device_rows_of(grads, keys.size()) : host_grads(grads, keys, table);
  });
  bind.def("send_all", &BoundedClient::send_all, WithoutGil(),
           "Sends all pending gradients of this rank to their owners and waits until they are applied.")
      .def("await_owners", &BoundedClient::await_owners, WithoutGil(),
           "Waits until the owners have applied the gradients that this rank has pushed.")
      .def("drop_all", &BoundedClient::drop_all, WithoutGil(),
           "Ends the transfers for announced batches, which may still be read.")
      .def("set_rates", &BoundedClient::set_rates, WithoutGil(), "Tells the owner's side this rank's step.")
      .def_property_readonly("num_held", &BoundedClient::num_held, "Messages with gradients held for other nodes.")
      .def_property_readonly(
          "last_read",
          [](const BoundedClient& of) {
            const Batch* last = of.last();
            if (last == nullptr) throw std::runtime_error("nothing was read yet");
            of.table().lines->await_slots();
            return py::make_tuple(array_of(last->slots), array_of(last->clocks));
          },
          "Slots and clocks (n,) of the keys of the last read.");
}

}  // namespace

void bind_client(py::module_& m) {
  bind_lines(m);
  m.attr("MOST_AHEAD") = kMostAhead;
  bind_keys(m);
  py::class_<Table>(m, "Table", "What the client of a table uses (cpp/client/client.h).")
      .def(py::init([](const PyKeySpace* space, const NodeRows* node, Channel* channel, Lines* lines, Spans* spans,
                       Counters* counters, std::vector<RingProducer*> rings) {
             if (rings.size() != static_cast<size_t>(space->partition.size()))
               throw std::invalid_argument("a table takes a ring, or None, for each rank");
             return Table{space, node, channel, lines, spans, counters, std::move(rings)};
           }),
           "space"_a, "node"_a, "channel"_a, "lines"_a, "spans"_a, "counters"_a, "rings"_a,
           "rings: of each rank, to another owner of this node, else None. The caller keeps what is given.");
  bind_schedule(m);
  bind_exact(m);
  bind_bounded(m);
}

}  // namespace hetmpi
