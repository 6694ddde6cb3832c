// PushApplier: an owner's side at staleness s >= 1; its thread; and NodeRows, which reads the shards of a node.
#include "python/push_applier.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <map>
#include <optional>
#include <type_traits>
#include <vector>

#include "owner/directory.h"
#include "owner/row_optimizer.h"
#include "python/arrays.h"
#include "python/bindings.h"
#include "python/gather.h"

namespace hetmpi {
namespace {

// One array of the shards of all owners on this node: rows (n, width) of T, or clocks (n) if T is int32.
template <typename T>
class NodeRows {
 public:
  // applier: writes the shard of rank `own`; null if nothing does. directories: of the same ranks. files: of those
  // whose rows are there, in place of their array.
  NodeRows(PyPushApplier* applier, int64_t own, std::map<int64_t, Array<T>> shards,
           std::map<int64_t, const Directory*> directories, std::map<int64_t, const RowFile*> files)
      : applier_(applier),
        own_(own),
        shards_(std::move(shards)),
        directories_(std::move(directories)),
        files_(std::move(files)) {}

  // out[order[i]] = the row of each key of a route that an owner on this node has. A clock is read whole, the rows of
  // this rank while they are not written. Returns the bytes of all keys of the route that other ranks own.
  int64_t gather(const Route& route, Array<T> out) {
    constexpr bool kClocks = std::is_same_v<T, int32_t>;
    const ssize_t num_out = out.shape(0), width = kClocks ? 1 : out.shape(1);
    T* to = out.mutable_data();
    for (const auto& [rank, shard] : shards_) {
      if (!kClocks) check_shape(shard, "out, as wide as the rows,", {-1, width});
      const int64_t begin = route.first().at(rank), end = route.first().at(rank + 1);
      if (begin == end) continue;
      const int64_t *key = route.keys().data() + begin, *position = route.order().data() + begin;
      const Directory* directory = directories_.at(rank);
      const T* from = shard.data();
      const ssize_t num_rows = shard.shape(0);
      const RowFile* file = files_.count(rank) ? files_.at(rank) : nullptr;
      PushApplier* writer = applier_ && rank == own_ ? &applier_->core() : nullptr;
      static thread_local std::vector<int64_t> rows;
      py::gil_scoped_release release;
      rows.resize(end - begin);
      directory->rows_of(key, end - begin, rows.data());
      const auto part = [&](auto copy, auto run) {
        gather_part(from, num_rows, rows.data(), to, num_out, position, end - begin, width, copy, run);
      };
      if constexpr (!kClocks) {
        if (file != nullptr) {
          const auto copy = [&] { gather_file(*file, rows, to, num_out, position, width); };
          writer ? writer->exclusively(copy) : copy();
          continue;
        }
      }
      if constexpr (kClocks)
        part(kClockCopy, kAtOnce);
      else if (writer)
        part(row_copy(width), [writer](auto loop) { writer->exclusively(loop); });
      else
        part(row_copy(width), kAtOnce);
    }
    return route.num_elsewhere(own_) * width * static_cast<int64_t>(sizeof(T));
  }

 private:
  static void gather_file(const RowFile& file, const std::vector<int64_t>& rows, T* to, ssize_t num_out,
                          const int64_t* position, ssize_t width) {
    const auto n = static_cast<ssize_t>(rows.size());
    check_in(position, n, num_out, "order");
    file.want(rows.data(), n);
    std::vector<float> scratch(width);
    for (ssize_t i = 0; i < n; ++i)
      std::memcpy(to + position[i] * width, file.read(rows[i], scratch.data()), width * sizeof(float));
  }

  PyPushApplier* applier_;
  int64_t own_;
  std::map<int64_t, Array<T>> shards_;  // by rank
  std::map<int64_t, const Directory*> directories_;
  std::map<int64_t, const RowFile*> files_;
};

template <typename T>
void bind_node_rows(py::module_& m, const char* name) {
  py::class_<NodeRows<T>>(m, name, "One array of the shards of all owners on this node, by rank.")
      .def(py::init<PyPushApplier*, int64_t, std::map<int64_t, Array<T>>, std::map<int64_t, const Directory*>,
                    std::map<int64_t, const RowFile*>>(),
           py::arg("applier").none(true), py::arg("own"), py::arg("shards"), py::arg("directories"),
           py::arg("files") = std::map<int64_t, const RowFile*>(), py::keep_alive<1, 2>(), py::keep_alive<1, 5>(),
           py::keep_alive<1, 6>())
      .def("gather", &NodeRows<T>::gather, py::arg("route"), py::arg("out").noconvert(),
           "out[order[i]] = the row of each key of a Route that an owner on this node has. Returns the bytes of all "
           "keys of the route that other ranks own.");
}

}  // namespace

void bind_push_applier(py::module_& m) {
  py::class_<PyPushApplier>(m, "PushApplier",
                            "The owner's side of a table at staleness s >= 1 (cpp/owner/push_applier.h).")
      .def(py::init<Array<uint8_t>, Array<float>, Array<float>, Array<int32_t>, Array<uint8_t>, Array<float>,
                    const Directory*, RowOptimizer, RowFile*>(),
           py::arg("rings").noconvert(), py::arg("weight").noconvert(), py::arg("state").noconvert(),
           py::arg("clock").noconvert(), py::arg("touched").noconvert(), py::arg("mean_square").noconvert(),
           py::arg("directory").none(false), py::arg("optimizer"), py::arg("file") = nullptr, py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>(), py::keep_alive<1, 4>(), py::keep_alive<1, 5>(), py::keep_alive<1, 6>(),
           py::keep_alive<1, 7>(), py::keep_alive<1, 8>(), py::keep_alive<1, 10>())
      .def("set_step", &PyPushApplier::set_step, py::arg("lrs"), py::arg("step"))
      .def("drain", &PyPushApplier::drain, "Applies what has arrived; returns the rows applied.")
      .def("apply", &PyPushApplier::apply, py::arg("message"), py::arg("rank"),
           "Applies the rows of a Message that `rank`, this one, owns.")
      .def("apply_record", &PyPushApplier::apply_record, py::arg("keys").noconvert(), py::arg("clocks").noconvert(),
           py::arg("counts").noconvert(), py::arg("steps").noconvert(), py::arg("grads").noconvert(),
           py::arg("squares").noconvert())
      .def("watch", &PyPushApplier::watch, py::arg("rings"), "The rings whose pushes are applied.")
      .def_property_readonly("num_histories", &PyPushApplier::num_histories, "Rows of which pushes are kept.");
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<ApplierThread>(m, "ApplierThread", "Applies what arrives for all tables of a rank while it computes.")
      .def(py::init())
      .def(
          "add", [](ApplierThread& thread, PyPushApplier& applier) { thread.add(&applier.core()); }, py::arg("applier"),
          without_gil, "Drains the rings of a PushApplier too, which must live until remove().")
      .def(
          "remove", [](ApplierThread& thread, PyPushApplier& applier) { thread.remove(&applier.core()); },
          py::arg("applier"), without_gil, "An applier that was not added, or is removed, has no effect.");
  bind_node_rows<float>(m, "NodeRows");
  bind_node_rows<int32_t>(m, "NodeClocks");
}

}  // namespace hetmpi
