// StepReducer: an owner's side of a synchronous step.
#include "owner/step_reducer.h"

#include <cstdint>
#include <utility>

#include "owner/ring.h"
#include "owner/row_optimizer.h"
#include "python/arrays.h"
#include "python/bindings.h"
#include "python/owner_arrays.h"

namespace hetmpi {
namespace {

class PyStepReducer {
 public:
  PyStepReducer(Array<uint8_t> rings, int64_t own_rank, Array<float> weight, Array<float> state, Array<int32_t> clock,
                Array<uint8_t> touched, const Directory* directory, Array<int64_t> applied, RowFile* file)
      : reducer_(consumers(rings.mutable_data(), rings.shape(1), rings.shape(0), {weight.shape(1), false}), own_rank,
                 shard_of(weight, state, clock, touched, directory, file)),
        dim_(weight.shape(1)),
        applied_(std::move(applied)) {
    check_shape(applied_, "applied", {-1});
  }

  void begin(int64_t step, Array<int64_t> keys, Array<int64_t> order, Array<float> grads) {
    const ssize_t n = keys.shape(0);
    check_shape(order, "order", {n});
    check_shape(grads, "grads", {-1, dim_});
    check_in(order.data(), n, grads.shape(0), "order");
    keys_ = keys, order_ = order, grads_ = grads;
    reducer_.begin(step, keys_.data(), order_.data(), grads_.data(), n);
  }

  bool poll() {
    py::gil_scoped_release release;
    return reducer_.poll();
  }

  int64_t apply(const RowOptimizer& optimizer) {
    int64_t* applied = applied_.mutable_data();
    py::gil_scoped_release release;
    const int64_t num_rows = reducer_.apply(optimizer);
    __atomic_store_n(applied, *applied + 1, __ATOMIC_RELEASE);  // the rows before it
    return num_rows;
  }

  int64_t awaited() const { return reducer_.awaited(); }

 private:
  StepReducer reducer_;
  int64_t dim_;
  Array<int64_t> applied_;
  Array<int64_t> keys_{0}, order_{0};  // of the open step, kept alive
  Array<float> grads_{0};
};

}  // namespace

void bind_step_reducer(py::module_& m) {
  py::class_<PyStepReducer>(m, "StepReducer", "The owner's side of one synchronous step (cpp/owner/step_reducer.h).")
      .def(py::init<Array<uint8_t>, int64_t, Array<float>, Array<float>, Array<int32_t>, Array<uint8_t>,
                    const Directory*, Array<int64_t>, RowFile*>(),
           py::arg("rings").noconvert(), py::arg("own_rank"), py::arg("weight").noconvert(),
           py::arg("state").noconvert(), py::arg("clock").noconvert(), py::arg("touched").noconvert(),
           py::arg("directory").none(false), py::arg("applied").noconvert(), py::arg("file") = nullptr,
           py::keep_alive<1, 2>(), py::keep_alive<1, 4>(), py::keep_alive<1, 5>(), py::keep_alive<1, 6>(),
           py::keep_alive<1, 7>(), py::keep_alive<1, 8>(), py::keep_alive<1, 10>(),
           "rings: one per rank, in rank order. applied (1,) or longer: its first number counts the steps applied.")
      .def("begin", &PyStepReducer::begin, py::arg("step"), py::arg("keys").noconvert(), py::arg("order").noconvert(),
           py::arg("grads").noconvert())
      .def("poll", &PyStepReducer::poll)
      .def("apply", &PyStepReducer::apply, py::arg("optimizer"))
      .def_property_readonly("awaited", &PyStepReducer::awaited);
}

}  // namespace hetmpi
