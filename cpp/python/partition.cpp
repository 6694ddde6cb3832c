// Partition, the directory of its formula, and keys by owner (Route).
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "owner/directory.h"
#include "owner/route.h"
#include "python/arrays.h"
#include "python/bindings.h"

namespace hetmpi {
namespace {

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

Array<int64_t> rows_of(const Directory& directory, const Array<int64_t>& keys) {
  Array<int64_t> rows(keys.shape(0));
  directory.rows_of(keys.data(), keys.shape(0), rows.mutable_data());
  return rows;
}

Array<int64_t> keys_of(const Partition& partition, int64_t rank, int64_t begin, int64_t end) {
  Array<int64_t> keys(end - begin);
  int64_t* out = keys.mutable_data();
  py::gil_scoped_release release;
  for (int64_t row = begin; row < end; ++row) out[row - begin] = partition.key_of(rank, row);
  return keys;
}

using Mask = Array<bool>;

const uint8_t* bytes_of(const Mask& mask) { return reinterpret_cast<const uint8_t*>(mask.data()); }
uint8_t* bytes_of(Mask& mask) { return reinterpret_cast<uint8_t*>(mask.mutable_data()); }

std::shared_ptr<const Route> route_of(const Partition& partition, const Array<int64_t>& keys) {
  const int64_t *key = keys.data(), n = keys.shape(0);
  py::gil_scoped_release release;
  return std::make_shared<const Route>(partition, key, n);
}

// The same route, if all keys are chosen.
std::shared_ptr<const Route> part_of(const std::shared_ptr<const Route>& route, const Mask& chosen) {
  check_shape(chosen, "chosen", {route->num_positions()});
  const uint8_t* mask = bytes_of(chosen);
  if (std::memchr(mask, 0, chosen.shape(0)) == nullptr) return route;
  return std::make_shared<const Route>(route->where(mask));
}

Mask held_by(const Route& route, const Mask& ranks) {
  check_shape(ranks, "ranks", {route.num_ranks()});
  Mask mask(route.num_positions());
  route.held_by(bytes_of(ranks), bytes_of(mask));
  return mask;
}

// The numbers of a route from `begin` on, as an array that keeps it alive and may not be changed.
py::object numbers(const py::object& route, const std::vector<int64_t>& from, int64_t begin, int64_t end) {
  Array<int64_t> array(end - begin, from.data() + begin, route);
  array.attr("setflags")(py::arg("write") = false);
  return array;
}

}  // namespace

void bind_partition(py::module_& m) {
  py::class_<Partition>(m, "Partition", "Which rank owns a key, and at which row of its shard (cpp/owner/partition.h).")
      .def(py::init<const std::string&, int64_t, int64_t>(), py::arg("kind"), py::arg("num_rows"), py::arg("size"))
      .def("num_local_rows", &Partition::num_local_rows, py::arg("rank"), "Rows of a rank's shard.")
      .def("locate", &locate, py::arg("keys").noconvert(), "keys (n,) int64 -> owner (n,) int64, row (n,) int64.")
      .def("keys_of", &keys_of, py::arg("rank"), py::arg("begin"), py::arg("end"),
           "Keys of rows [begin, end) of a rank's shard: (end - begin,) int64.")
      .def("route", &route_of, py::arg("keys").noconvert(), "The Route of keys (n,) int64.");
  py::class_<Directory>(m, "Directory", "Which row of its shard an owner has for a key (cpp/owner/directory.h).")
      .def(py::init<const Partition&, int64_t>(), py::arg("partition"), py::arg("owner"))
      .def("rows_of", &rows_of, py::arg("keys").noconvert(), "keys (n,) int64, this owner's -> rows (n,) int64.");
  const auto all_of = [](const std::vector<int64_t>& (Route::*column)() const) {
    return [column](const py::object& self) {
      const auto& route = self.cast<const Route&>();
      return numbers(self, (route.*column)(), 0, route.size());
    };
  };
  py::class_<Route, std::shared_ptr<Route>>(m, "Route", "The keys of a batch sorted by owner (cpp/owner/route.h).")
      .def(py::init<int64_t>(), py::arg("num_ranks"), "Of no keys.")
      .def("__len__", &Route::size)
      .def("where", &part_of, py::arg("chosen").noconvert(),
           "The part of the chosen (n,) bool keys; positions remain those in the whole batch.")
      .def("held_by", &held_by, py::arg("ranks").noconvert(),
           "Mask (n,) bool of the keys that the selected ranks (size,) bool own, for the route of a whole batch.")
      .def("num_elsewhere", &Route::num_elsewhere, py::arg("rank"), "Number of keys that other ranks own.")
      .def(
          "of",
          [](const py::object& self, int64_t owner) {
            const auto& route = self.cast<const Route&>();
            const int64_t begin = route.first().at(owner), end = route.first().at(owner + 1);
            return py::make_tuple(numbers(self, route.keys(), begin, end), numbers(self, route.order(), begin, end));
          },
          py::arg("owner"), "(keys, order) of the keys that `owner` owns.")
      .def_property_readonly(
          "owners",
          [](const Route& route) {
            std::vector<int64_t> owners;
            for (int64_t rank = 0; rank < route.num_ranks(); ++rank)
              if (route.view().num(rank) > 0) owners.push_back(rank);
            return owners;
          },
          "Ranks that own at least one of the keys, ascending.")
      .def_property_readonly("order", all_of(&Route::order),
                             "Position in the batch of the i-th routed key: (n,) int64.")
      .def_property_readonly("keys", all_of(&Route::keys), "That key: (n,) int64.");
}

}  // namespace hetmpi
