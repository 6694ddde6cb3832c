// Partition, the directory of its formula, and keys by owner.
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "owner/directory.h"
#include "owner/keys.h"
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

// Keys with the tensor that identifies their batch in later calls, and its values.
struct PyKeys {
  py::object tensor;
  Array<int64_t> array;
  Keys core;

  PyKeys(py::object tensor, Array<int64_t> array, const Partition& partition, const Mask& remote_ranks,
         const Mask& admitted_ranks)
      : tensor(std::move(tensor)),
        array(std::move(array)),
        core(made(partition, this->array, checked(remote_ranks, partition), checked(admitted_ranks, partition))) {}

  bool has_values(const Array<int64_t>& values) const {
    return array.size() == values.size() && std::memcmp(array.data(), values.data(), array.nbytes()) == 0;
  }

  bool are_those_of(const PyKeys& other) const {
    return this == &other || (tensor.is(other.tensor) && has_values(other.array));
  }

 private:
  static const uint8_t* checked(const Mask& ranks, const Partition& partition) {
    check_shape(ranks, "ranks", {static_cast<ssize_t>(partition.size())});
    return bytes_of(ranks);
  }

  static Keys made(const Partition& partition, const Array<int64_t>& array, const uint8_t* remote,
                   const uint8_t* admitted) {
    const int64_t *key = array.data(), n = array.size();
    py::gil_scoped_release release;
    return Keys(partition, key, n, remote, admitted);
  }
};

// Keys that were checked last, at most so many. Used with the GIL, by several threads.
class RecentKeys {
 public:
  explicit RecentKeys(size_t most) : most_(most) {}

  size_t most() const { return most_; }
  void set_most(size_t most) { most_ = most; }

  void add(std::shared_ptr<PyKeys> keys) {
    kept_.push_back(std::move(keys));
    while (kept_.size() > most_) {
      const std::shared_ptr<PyKeys> oldest = std::move(kept_.front());
      kept_.pop_front();  // before its end, which may run Python
    }
  }

  // Those of this tensor, if it still has their values; else null.
  std::shared_ptr<PyKeys> find(const py::object& tensor) const {
    std::vector<std::shared_ptr<PyKeys>> found;  // numpy() may let another thread add keys
    for (const auto& keys : kept_)
      if (keys->tensor.is(tensor)) found.push_back(keys);
    if (found.empty()) return nullptr;
    const auto values = Array<int64_t>::ensure(tensor.attr("numpy")());
    for (const auto& keys : found)
      if (values && keys->has_values(values)) return keys;
    return nullptr;
  }

 private:
  size_t most_;
  std::deque<std::shared_ptr<PyKeys>> kept_;
};

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
  const auto mask_of = [](std::vector<uint8_t> Keys::* mask) {
    return [mask](const py::object& self) {
      const std::vector<uint8_t>& values = self.cast<const PyKeys&>().core.*mask;
      return Mask(values.size(), reinterpret_cast<const bool*>(values.data()), self);
    };
  };
  const auto route_in = [](std::shared_ptr<const Route> Keys::* route) {
    return [route](const PyKeys& keys) { return keys.core.*route; };
  };
  py::class_<PyKeys, std::shared_ptr<PyKeys>>(m, "Keys", "Keys of a call, checked (cpp/owner/keys.h).")
      .def(py::init<py::object, Array<int64_t>, const Partition&, const Mask&, const Mask&>(), py::arg("tensor"),
           py::arg("array").noconvert(), py::arg("partition"), py::arg("remote_ranks").noconvert(),
           py::arg("admitted_ranks").noconvert(),
           "tensor: identifies the batch; array: its values (U,) int64, not to be changed. Masks (size,) bool of the "
           "ranks on other nodes, and of those whose rows may be cached. Raises IndexError for a key that is not in "
           "the table.")
      .def("are_those_of", &PyKeys::are_those_of, py::arg("other"),
           "Whether they identify the same batch: the same tensor with the same values.")
      .def_readonly("tensor", &PyKeys::tensor)
      .def_readonly("array", &PyKeys::array)
      .def_property_readonly("route", route_in(&Keys::route), "Their owners.")
      .def_property_readonly("local_route", route_in(&Keys::local_route), "The part on this node.")
      .def_property_readonly("remote_route", route_in(&Keys::remote_route), "The part on other nodes.")
      .def_property_readonly("is_remote", mask_of(&Keys::is_remote),
                             "Mask of the keys owned on other nodes, (U,) bool.")
      .def_property_readonly("is_admitted", mask_of(&Keys::is_admitted),
                             "Mask of the keys that may be cached, (U,) bool.");
  py::class_<RecentKeys>(m, "RecentKeys", "Keys that were checked last.")
      .def(py::init<size_t>(), py::arg("most"))
      .def_property("most", &RecentKeys::most, &RecentKeys::set_most, "How many are kept.")
      .def("add", &RecentKeys::add, py::arg("keys"))
      .def("find", &RecentKeys::find, py::arg("tensor"), "Those of this tensor, None if its values are others now.");
}

}  // namespace hetmpi
