// Maps of ids to keys.
#include "owner/id_map.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "python/arrays.h"
#include "python/bindings.h"

namespace hetmpi {
namespace {

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

void assign(IdMap& map, const Array<int64_t>& all) {
  const std::vector<IdMap::Entry> found = entries_of(all);
  map.assign(found.data(), static_cast<int64_t>(found.size()));
}

void add_counts(IdMap& map, const Array<int64_t>& all) {
  const std::vector<IdMap::Entry> found = entries_of(all);
  map.add_counts(found.data(), static_cast<int64_t>(found.size()));
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

}  // namespace

void bind_id_map(py::module_& m) {
  py::class_<IdMap>(m, "IdMap", "Ids with their keys, how often and when they were seen (cpp/owner/id_map.h).")
      .def(py::init([](int64_t every) {
             if (every < 1) throw std::invalid_argument("every must be at least 1, got " + std::to_string(every));
             return IdMap(every);
           }),
           py::arg("every"), "every: steps after which counts are halved.")
      .def("__len__", &IdMap::size)
      .def_property_readonly("num_admitted", &IdMap::num_admitted, "Number of ids with a key.")
      .def_property_readonly("nbytes", &IdMap::nbytes, "Bytes of memory.")
      .def("look_up", &look_up, py::arg("ids").noconvert(), py::arg("counts") = py::none(), py::arg("step") = 0,
           "Keys (n,) int64 of ids (n,) int64, -1 for those without one. Adds counts (n,) int64 to those with one.")
      .def("see", &see, py::arg("ids").noconvert(), py::arg("counts").noconvert(), py::arg("step"), py::arg("least"),
           "Adds counts (n,) int64 to ids (n,) int64. Returns those that wait and reach `least` by this, int64.")
      .def("admit", &admit, py::arg("ids").noconvert(), py::arg("keys").noconvert(),
           "Gives ids (n,) int64 the keys (n,) int64.")
      .def("entries", &entries, "All ids: (n, 4) int64 of id, key or -1, count, step last seen, in no order.")
      .def("assign", &assign, py::arg("entries").noconvert(), "Replaces all ids by entries (n, 4) int64.")
      .def("add_counts", &add_counts, py::arg("entries").noconvert(),
           "Adds the counts of entries (n, 4) int64 to the same ids where they have a key.")
      .def("take_counts", &take_counts, "As entries(), of ids seen since the last call; their counts become 0.");
  m.def("directories", &directories, py::arg("ids").noconvert(), py::arg("size"),
        "Ranks (n,) int64, of `size`, whose directories have ids (n,) int64.");
}

}  // namespace hetmpi
