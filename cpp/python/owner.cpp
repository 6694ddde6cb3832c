// What the owners of rows use: row rules, partitions and routes, rows in files, rings, push appliers, maps of ids.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "owner/directory.h"
#include "owner/id_map.h"
#include "owner/node_rows.h"
#include "owner/push_applier.h"
#include "owner/push_history.h"
#include "owner/ring.h"
#include "owner/route.h"
#include "owner/row_file.h"
#include "owner/row_optimizer.h"
#include "python/arrays.h"
#include "python/bindings.h"
#include "python/shard_arrays.h"

namespace hetmpi {
namespace {

// The states of cache lines, of rows' states (n, state_dim): (n, preview_dim), or (n, 0) if they are not kept.
void mean_squares(const RowOptimizer& rule, const Array<float>& state, Array<float> out) {
  const ssize_t n = state.shape(0);
  check_shape(state, "state", {n, rule.state_dim()});
  check_shape(out, "out", {n, -1});
  if (out.shape(1) == 0) return;
  check_shape(out, "out", {n, rule.preview_dim()});
  const float* states = state.data();
  float* means = out.mutable_data();
  py::gil_scoped_release release;
  for (ssize_t row = 0; row < n; ++row) means[row] = rule.mean_square(states + row * rule.state_dim());
}

void bind_optimizer(py::module_& m) {
  py::class_<RowOptimizer>(m, "RowOptimizer")
      .def(py::init<const std::string&, int64_t, float, float, float, float, float, float>(), "rule"_a, "dim"_a,
           "weight_decay"_a, "beta1"_a, "beta2"_a, "eps"_a, "l1"_a, "l2"_a)
      .def_property_readonly("state_dim", &RowOptimizer::state_dim)
      .def_property_readonly("preview_dim", &RowOptimizer::preview_dim)
      .def_property_readonly("sum_dim", &RowOptimizer::sum_dim)
      .def_property_readonly("is_plain", &RowOptimizer::is_plain)
      .def_property_readonly(
          "history_bytes", [](const RowOptimizer& rule) { return rule.is_plain() ? 0 : PushHistory::row_bytes(rule); },
          "Memory of an owner for each row of which it keeps pushes, at most (cpp/owner/push_history.h).")
      .def("mean_squares", &mean_squares, as_is("state"), as_is("out"))
      .def("set_step", &RowOptimizer::set_step, "lr"_a, "step"_a);
}

py::tuple locate(const Partition& partition, const Array<int64_t>& keys) {
  const ssize_t n = keys.shape(0);
  Array<int64_t> owner(n), row(n);
  for (ssize_t i = 0; i < n; ++i) {
    const Place place = partition.locate(keys.data()[i]);
    owner.mutable_data()[i] = place.owner;
    row.mutable_data()[i] = place.row;
  }
  return py::make_tuple(owner, row);
}

Array<int64_t> shard_rows(const Directory& directory, const Array<int64_t>& keys) {
  Array<int64_t> rows(keys.shape(0));
  directory.rows_of(keys.data(), keys.shape(0), rows.mutable_data());
  return rows;
}

Array<int64_t> shard_keys(const Partition& partition, int64_t rank, int64_t begin, int64_t end) {
  Array<int64_t> keys(end - begin);
  int64_t* out = keys.mutable_data();
  py::gil_scoped_release release;
  for (int64_t row = begin; row < end; ++row) out[row - begin] = partition.key_of(rank, row);
  return keys;
}

std::shared_ptr<const Route> route_of(const Partition& partition, const Array<int64_t>& keys) {
  const int64_t *key = keys.data(), n = keys.shape(0);
  py::gil_scoped_release release;
  return std::make_shared<const Route>(partition, key, n);
}

// The numbers of a route from `begin` on, as an array that keeps it alive and may not be changed.
py::object numbers(const py::object& route, const std::vector<int64_t>& from, int64_t begin, int64_t end) {
  Array<int64_t> array(end - begin, from.data() + begin, route);
  array.attr("setflags")("write"_a = false);
  return array;
}

void bind_partition(py::module_& m) {
  py::class_<Route, std::shared_ptr<Route>>(m, "Route", "The keys of a batch sorted by owner (cpp/owner/route.h).")
      .def(
          "of",
          [](const py::object& self, int64_t owner) {
            const auto& route = self.cast<const Route&>();
            const int64_t begin = route.first().at(owner), end = route.first().at(owner + 1);
            return py::make_tuple(numbers(self, route.keys(), begin, end), numbers(self, route.order(), begin, end));
          },
          "owner"_a, "(keys, order) of the keys that `owner` owns.")
      .def_property_readonly(
          "owners",
          [](const Route& route) {
            std::vector<int64_t> owners;
            for (int64_t rank = 0; rank < route.num_ranks(); ++rank)
              if (route.view().num(rank) > 0) owners.push_back(rank);
            return owners;
          },
          "Ranks that own at least one of the keys, ascending.");
  py::class_<Partition>(m, "Partition", "Which rank owns a key, and at which row of its shard (cpp/owner/partition.h).")
      .def(py::init<const std::string&, int64_t, int64_t>(), "kind"_a, "num_rows"_a, "size"_a)
      .def("num_local_rows", &Partition::num_local_rows, "rank"_a, "Rows of a rank's shard.")
      .def("locate", &locate, as_is("keys"), "keys (n,) int64 -> owner (n,) int64, row (n,) int64.")
      .def("keys_of", &shard_keys, "rank"_a, "begin"_a, "end"_a,
           "Keys of rows [begin, end) of a rank's shard: (end - begin,) int64.")
      .def("route", &route_of, as_is("keys"), "The Route of keys (n,) int64.");
  py::class_<Directory>(m, "Directory", "Which row of its shard an owner has for a key (cpp/owner/directory.h).")
      .def(py::init<const Partition&, int64_t>(), "partition"_a, "owner"_a)
      .def("rows_of", &shard_rows, as_is("keys"), "keys (n,) int64, this owner's -> rows (n,) int64.");
}

std::unique_ptr<RowFile> opened(int file, int before, int ballast, int64_t num_rows, int64_t dim, int64_t state_dim,
                                Array<uint8_t> rows, Array<uint8_t> pages, Array<int64_t> counts,
                                const Partition& partition, int64_t owner, uint64_t seed, float std,
                                int64_t budget_pages) {
  const RowFile::Form form{num_rows, dim, state_dim};
  check_shape(rows, "rows", {num_rows});
  check_shape(pages, "pages", {RowFile::bytes(form) / static_cast<int64_t>(kPage)});
  check_shape(counts, "counts", {kNumFileCounts});
  const RowFile::Marks marks{rows.mutable_data(), pages.mutable_data(), counts.mutable_data()};
  return std::make_unique<RowFile>(file, before, ballast, form, marks, RowFile::Init{partition, owner, seed, std},
                                   budget_pages);
}

// Rows (n) as they are, or as they were frozen, to out (n, width).
void copy_rows(const RowFile& file, const Array<int64_t>& rows, bool is_state, bool is_frozen, Array<float> out) {
  const ssize_t n = rows.shape(0);
  check_in(rows.data(), n, file.form().num_rows, "rows");
  check_shape(out, "out", {n, is_state ? file.form().state_dim : file.form().dim});
  const int64_t* row = rows.data();
  float* to = out.mutable_data();
  if (file.is_closed() && !is_frozen) throw std::runtime_error("the table is closed");
  py::gil_scoped_release release;
  is_frozen ? file.copy_frozen(row, n, is_state, to) : file.copy(row, n, is_state, to);
}

// Writes weight or state (n, width) of rows (n), but not what absent rows have anyhow.
void assign_rows(RowFile& file, const Array<int64_t>& rows, bool is_state, const Array<float>& values) {
  const ssize_t n = rows.shape(0), width = is_state ? file.form().state_dim : file.form().dim;
  check_in(rows.data(), n, file.form().num_rows, "rows");
  check_shape(values, "values", {n, width});
  const int64_t* row = rows.data();
  const float* from = values.data();
  py::gil_scoped_release release;
  file.want(row, n);
  for (ssize_t i = 0; i < n; ++i)
    if (!file.has_first_value(row[i], is_state, from + i * width))
      std::copy_n(from + i * width, width, file.to_write(row[i]) + (is_state ? file.form().dim : 0));
}

void want_rows(const RowFile& file, const Array<int64_t>& rows) {
  check_in(rows.data(), rows.shape(0), file.form().num_rows, "rows");
  file.want(rows.data(), rows.shape(0));
}

void bind_row_file(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const std::system_error& problem) {
      PyErr_SetObject(PyExc_OSError, py::make_tuple(problem.code().value(), problem.what()).ptr());
    }
  });
  m.def(
      "row_file_bytes",
      [](int64_t num_rows, int64_t dim, int64_t state_dim) { return RowFile::bytes({num_rows, dim, state_dim}); },
      "num_rows"_a, "dim"_a, "state_dim"_a, "Bytes of a RowFile, before its rows take disk.");
  m.attr("FILE_PAGE_BYTES") = kPage;
  m.attr("NUM_FILE_COUNTS") = static_cast<int>(kNumFileCounts);
  m.def("disk_waits", &disk_waits, "How often this thread has waited for a disk.");
  py::class_<RowFile>(m, "RowFile", "The rows of a shard in a file (cpp/owner/row_file.h).")
      .def(py::init(&opened), "file"_a, "before"_a, "ballast"_a, "num_rows"_a, "dim"_a, "state_dim"_a, as_is("rows"),
           as_is("pages"), as_is("counts"), "partition"_a, "owner"_a, "seed"_a, "std"_a, "budget_pages"_a,
           py::keep_alive<1, 8>(), py::keep_alive<1, 9>(), py::keep_alive<1, 10>())
      .def("copy", &copy_rows, as_is("rows"), "is_state"_a, "is_frozen"_a, as_is("out"))
      .def("assign", &assign_rows, as_is("rows"), "is_state"_a, as_is("values"))
      .def("want", &want_rows, as_is("rows"), "Begins to read the pages of rows (n,) int64.")
      .def("freeze", &RowFile::freeze)
      .def("close", &RowFile::close, WithoutGil())
      .def("thaw", &RowFile::thaw, WithoutGil())
      .def_property_readonly("resident_pages", [](const RowFile& file) { return file.count(kResidentPages); })
      .def_property_readonly("pages_read", [](const RowFile& file) { return file.count(kPagesRead); })
      .def_property_readonly("pages_written", [](const RowFile& file) { return file.count(kPagesWritten); })
      .def_property_readonly("pages_allocated", [](const RowFile& file) { return file.count(kPagesAllocated); })
      .def_property_readonly("is_full", [](const RowFile& file) { return file.count(kBallastUsed) > 0; });
  py::class_<PageKeeper>(m, "PageKeeper", "The threads that read and drop pages (cpp/owner/row_file.h).")
      .def(py::init<std::vector<RowFile*>>(), "files"_a, py::keep_alive<1, 2>())
      .def("stop", &PageKeeper::stop, WithoutGil());
}

RingProducer producer_of(Array<uint8_t> memory, RecordFormat format) {
  constexpr ssize_t kHeaderBytes = sizeof(RingHeader);
  return {memory.mutable_data(), static_cast<uint64_t>(std::max(memory.size(), kHeaderBytes) - kHeaderBytes), format};
}

void bind_ring(py::module_& m) {
  m.attr("RING_HEADER_BYTES") = sizeof(RingHeader);

  py::class_<RecordFormat>(m, "RecordFormat", "What is sent of each row (cpp/owner/ring.h).")
      .def(py::init<int64_t, bool>(), "width"_a, "has_clocks"_a);
  m.def("push_format", &push_format, "rule"_a, "What is sent of a push's rows.");
  m.def("min_ring_capacity", &min_ring_capacity, "format"_a);

  py::class_<RingProducer>(m, "RingProducer", "The producer's end of a ring (cpp/owner/ring.h).")
      .def(py::init(&producer_of), as_is("memory"), "format"_a, py::keep_alive<1, 2>());
}

void bind_shards(py::module_& m) {
  py::class_<ShardArrays>(m, "ShardArrays", "A shard of this node.")
      .def(py::init<Array<float>, Array<float>, Array<float>, Array<int32_t>, Array<int64_t>, Array<uint8_t>,
                    const Directory*, RowFile*, std::optional<Array<uint8_t>>>(),
           as_is("weight"), as_is("state"), as_is("mean_square"), as_is("clock"), as_is("applied"), as_is("rings"),
           "directory"_a.none(false), "file"_a, as_is("touched"), py::keep_alive<1, 8>(), py::keep_alive<1, 9>(),
           "As of Shard in hetmpi/owner/store.py, touched of this rank's own, else None; file: has weight and state, "
           "which have no rows then.")
      .def_property_readonly("weight", &ShardArrays::weight);
}

// Applies the columns of a record, as one that another rank sent.
void apply_record(PushApplier& owner, const Array<int64_t>& keys, const Array<int32_t>& clocks,
                  const Array<int32_t>& counts, const std::optional<Array<int32_t>>& steps, const Array<float>& grads,
                  const Array<float>& squares) {
  const RecordFormat format = owner.format();
  const ssize_t n = keys.shape(0);
  check_shape(grads, "grads", {n, format.dim()});
  check_shape(clocks, "clocks", {n});
  check_shape(counts, "counts", {n});
  if (steps.has_value() != format.has_steps) throw std::invalid_argument("steps are missing, or have no place");
  if (steps) check_shape(*steps, "steps", {n, 2});
  const int32_t* count = counts.data();
  const auto has_squares = [format](int32_t of) { return format.has_squares(of); };
  check_shape(squares, "squares", {std::count_if(count, count + n, has_squares), format.square_dim});
  const RecordColumns columns{keys.data(),  clocks.data(), count, steps ? steps->data() : nullptr,
                              grads.data(), squares.data()};
  py::gil_scoped_release release;
  owner.apply(columns, n);
}

void bind_push_applier(py::module_& m) {
  py::class_<PushApplier>(m, "PushApplier",
                          "The owner's side of a table at staleness s >= 1 (cpp/owner/push_applier.h).")
      .def(py::init([](ShardArrays& shard, const RowOptimizer& rule) {
             return new PushApplier(shard.ends(push_format(rule)), shard.core(), rule);
           }),
           "shard"_a, "rule"_a, py::keep_alive<1, 2>())
      .def(
          "set_step",
          [](PushApplier& of, const std::vector<double>& lrs, int64_t step) {
            of.set_step(lrs.data(), static_cast<int64_t>(lrs.size()), step);
          },
          "lrs"_a, "step"_a, WithoutGil())
      .def("drain", &PushApplier::drain, WithoutGil(), "Applies what has arrived; returns the rows applied.")
      .def("apply_record", &apply_record, as_is("keys"), as_is("clocks"), as_is("counts"), as_is("steps"),
           as_is("grads"), as_is("squares"))
      .def("watch", &PushApplier::watch, "rings"_a, "The rings whose pushes are applied.")
      .def_property_readonly("num_histories", py::cpp_function(&PushApplier::num_histories, WithoutGil()),
                             "Rows of which pushes are kept.");
  py::class_<ApplierThread>(m, "ApplierThread", "Applies what arrives for all tables of a rank while it computes.")
      .def(py::init())
      .def("add", &ApplierThread::add, "applier"_a.none(false), WithoutGil(),
           "Drains the rings of a PushApplier too, which must live until remove().")
      .def("remove", &ApplierThread::remove, "applier"_a.none(false), WithoutGil(),
           "An applier that was not added, or is removed, has no effect.");
}

void bind_node_rows(py::module_& m) {
  using Shards = std::vector<ShardArrays*>;
  const auto rows_of = [](const Shards& shards, std::vector<int64_t> ranks, int64_t own, bool has_states,
                          PushApplier* applier) {
    std::vector<NodeShard> views;
    for (const ShardArrays* shard : shards) views.push_back(shard->view(has_states));
    std::vector<int64_t> dims{shards.at(0)->dim()};
    if (has_states) dims.push_back(1);
    return NodeRows(std::move(views), std::move(ranks), own, std::move(dims), applier);
  };
  py::class_<NodeRows>(m, "NodeRows", "The shards of all owners of a node (cpp/owner/node_rows.h).")
      .def(py::init(rows_of), "shards"_a, "ranks"_a, "own"_a, "has_states"_a, "applier"_a.none(true),
           py::keep_alive<1, 2>(), py::keep_alive<1, 6>(),
           "ranks: of the owners, ascending. has_states: whether mean squares are read with the rows. applier: writes "
           "the shard of rank `own`, None at s = 0.")
      .def_property_readonly("dims", &NodeRows::dims, "Numbers of each array of a row.");
}

Array<int64_t> look_up(IdMap& map, const Array<int64_t>& ids, const std::optional<Array<int64_t>>& counts,
                       int64_t step) {
  check_shape(ids, "ids", {-1});
  if (counts) check_shape(*counts, "counts", {ids.shape(0)});
  Array<int64_t> keys(ids.shape(0));
  map.look_up(ids.data(), ids.shape(0), counts ? counts->data() : nullptr, step, keys.mutable_data());
  return keys;
}

Array<int64_t> see(IdMap& map, const Array<int64_t>& ids, const Array<int64_t>& counts, int64_t step, int64_t least) {
  check_shape(ids, "ids", {-1});
  check_shape(counts, "counts", {ids.shape(0)});
  std::vector<int64_t> found;
  const int64_t* id = ids.data();
  map.see(id, counts.data(), ids.shape(0), step, least, [&](int64_t i) { found.push_back(id[i]); });
  return Array<int64_t>(found.size(), found.data());
}

void admit(IdMap& map, const Array<int64_t>& ids, const Array<int64_t>& keys) {
  check_shape(ids, "ids", {-1});
  check_shape(keys, "keys", {ids.shape(0)});
  check_in(keys.data(), keys.shape(0), INT64_MAX, "keys", IdMap::kWaiting);
  map.admit(ids.data(), keys.data(), ids.shape(0));
}

// (n, 4): id, key, count, step.
Array<int64_t> entries(IdMap& map) {
  Array<int64_t> out({map.size(), int64_t{4}});
  int64_t* to = out.mutable_data();
  map.for_each([&](const IdMap::Entry& entry) {
    for (int64_t value : {entry.id, entry.key, entry.count, entry.last}) *to++ = value;
  });
  return out;
}

std::vector<IdMap::Entry> entries_of(const Array<int64_t>& all) {
  check_shape(all, "entries", {-1, 4});
  std::vector<IdMap::Entry> found;
  const int64_t* at = all.data();
  for (ssize_t i = 0; i < all.shape(0); ++i, at += 4) {
    check_in(at + 1, 1, INT64_MAX, "keys", IdMap::kWaiting);
    found.push_back({at[0], at[1], at[2], at[3]});
  }
  return found;
}

// Calls a verb of the map with entries (n, 4).
auto with_entries(void (IdMap::*verb)(const IdMap::Entry*, int64_t)) {
  return [verb](IdMap& map, const Array<int64_t>& all) {
    const std::vector<IdMap::Entry> found = entries_of(all);
    (map.*verb)(found.data(), static_cast<int64_t>(found.size()));
  };
}

// Entries seen since the last call, as entries(); their counts begin at 0 again.
Array<int64_t> take_counts(IdMap& map) {
  std::vector<int64_t> found;
  map.for_each([&](IdMap::Entry& entry) {
    if (entry.count == 0) return;
    for (int64_t value : {entry.id, entry.key, entry.count, entry.last}) found.push_back(value);
    entry.count = 0;
  });
  const ssize_t num = static_cast<ssize_t>(found.size()) / 4;
  return Array<int64_t>({num, ssize_t{4}}, found.data());
}

Array<int64_t> directories(const Array<int64_t>& ids, int64_t size) {
  check_shape(ids, "ids", {-1});
  if (size < 1 || size > INT32_MAX) throw std::invalid_argument("size must be a number of ranks");
  Array<int64_t> out(ids.shape(0));
  for (ssize_t i = 0; i < ids.shape(0); ++i) out.mutable_data()[i] = directory_of(ids.data()[i], size);
  return out;
}

void bind_id_map(py::module_& m) {
  py::class_<IdMap>(m, "IdMap", "Ids with their keys, how often and when they were seen (cpp/owner/id_map.h).")
      .def(py::init([](int64_t every) {
             if (every < 1) throw std::invalid_argument("every must be at least 1, got " + std::to_string(every));
             return IdMap(every);
           }),
           "every"_a, "every: steps after which counts are halved.")
      .def("__len__", &IdMap::size)
      .def_property_readonly("num_admitted", &IdMap::num_admitted, "Number of ids with a key.")
      .def_property_readonly("nbytes", &IdMap::nbytes, "Bytes of memory.")
      .def("look_up", &look_up, as_is("ids"), "counts"_a = py::none(), "step"_a = 0,
           "Keys (n,) int64 of ids (n,) int64, -1 for those without one. Adds counts (n,) int64 to those with one.")
      .def("see", &see, as_is("ids"), as_is("counts"), "step"_a, "least"_a,
           "Adds counts (n,) int64 to ids (n,) int64. Returns those that wait and reach `least` by this, int64.")
      .def("admit", &admit, as_is("ids"), as_is("keys"), "Gives ids (n,) int64 the keys (n,) int64.")
      .def("entries", &entries, "All ids: (n, 4) int64 of id, key or -1, count, step last seen, in no order.")
      .def("assign", with_entries(&IdMap::assign), as_is("entries"), "Replaces all ids by entries (n, 4) int64.")
      .def("add_counts", with_entries(&IdMap::add_counts), as_is("entries"),
           "Adds the counts of entries (n, 4) int64 to the same ids where they have a key.")
      .def("take_counts", &take_counts, "As entries(), of ids seen since the last call; their counts become 0.");
  m.def("directories", &directories, as_is("ids"), "size"_a,
        "Ranks (n,) int64, of `size`, whose directories have ids (n,) int64.");
}

}  // namespace

void bind_owner(py::module_& m) {
  bind_optimizer(m);
  bind_partition(m);
  bind_row_file(m);
  bind_ring(m);
  bind_shards(m);
  bind_push_applier(m);
  bind_node_rows(m);
  bind_id_map(m);
}

}  // namespace hetmpi
