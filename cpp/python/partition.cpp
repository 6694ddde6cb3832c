// Partition, the directory of its formula, and parts of routes.
#include "owner/partition.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "owner/directory.h"
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

py::tuple route_of(const Partition& partition, const Array<int64_t>& keys) {
  const ssize_t n = keys.shape(0);
  Array<int64_t> order(n), sorted(n), first(partition.size() + 1);
  const int64_t* key = keys.data();
  int64_t *orders = order.mutable_data(), *to = sorted.mutable_data(), *firsts = first.mutable_data();
  {
    static thread_local std::vector<int64_t> owners;
    py::gil_scoped_release release;
    route(partition, key, n, orders, to, firsts, &owners);
  }
  return py::make_tuple(order, sorted, first);
}

// The part of a route whose keys are chosen (n of the whole batch); None if all are.
std::optional<py::tuple> part_of_route(const Array<int64_t>& order, const Array<int64_t>& keys,
                                       const Array<int64_t>& first, const Array<bool>& chosen) {
  const ssize_t n = order.shape(0), size = first.shape(0) - 1;
  check_shape(keys, "keys", {n});
  const auto* mask = reinterpret_cast<const uint8_t*>(chosen.data());
  if (std::memchr(mask, 0, chosen.shape(0)) == nullptr) return std::nullopt;
  check_in(order.data(), n, chosen.shape(0), "order");
  Array<int64_t> out_order(n), out_keys(n), out_first(size + 1);
  const int64_t kept = route_where(order.data(), keys.data(), first.data(), size, mask, out_order.mutable_data(),
                                   out_keys.mutable_data(), out_first.mutable_data());
  const py::slice front(0, kept, 1);
  return py::make_tuple(out_order[front], out_keys[front], out_first);
}

}  // namespace

void bind_partition(py::module_& m) {
  py::class_<Partition>(m, "Partition", "Which rank owns a key, and at which row of its shard (cpp/owner/partition.h).")
      .def(py::init<const std::string&, int64_t, int64_t>(), py::arg("kind"), py::arg("num_rows"), py::arg("size"))
      .def("num_local_rows", &Partition::num_local_rows, py::arg("rank"), "Rows of a rank's shard.")
      .def("locate", &locate, py::arg("keys").noconvert(), "keys (n,) int64 -> owner (n,) int64, row (n,) int64.")
      .def("keys_of", &keys_of, py::arg("rank"), py::arg("begin"), py::arg("end"),
           "Keys of rows [begin, end) of a rank's shard: (end - begin,) int64.")
      .def("route", &route_of, py::arg("keys").noconvert(), "keys (n,) int64 -> order, keys, first of their Route.");
  py::class_<Directory>(m, "Directory", "Which row of its shard an owner has for a key (cpp/owner/directory.h).")
      .def(py::init<const Partition&, int64_t>(), py::arg("partition"), py::arg("owner"))
      .def("rows_of", &rows_of, py::arg("keys").noconvert(), "keys (n,) int64, this owner's -> rows (n,) int64.");
  m.def("part_of_route", &part_of_route, py::arg("order").noconvert(), py::arg("keys").noconvert(),
        py::arg("first").noconvert(), py::arg("chosen").noconvert(),
        "order, keys, first of the part of a Route whose keys are chosen (n,) bool; None if all are.");
}

}  // namespace hetmpi
