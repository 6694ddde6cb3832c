// StepReducer: an owner's side of a synchronous step.
#include "owner/step_reducer.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "owner/ring.h"
#include "owner/row_optimizer.h"
#include "python/arrays.h"
#include "python/bindings.h"
#include "python/owner_arrays.h"
#include "python/wire_arrays.h"

namespace hetmpi {
namespace {

class PyStepReducer {
 public:
  PyStepReducer(Array<uint8_t> rings, int64_t own_rank, Array<float> weight, Array<float> state, Array<int32_t> clock,
                Array<uint8_t> touched, const Directory* directory, Array<int64_t> applied, RowFile* file)
      : reducer_(consumers(rings.mutable_data(), rings.shape(1), rings.shape(0), {weight.shape(1), false}), own_rank,
                 shard_of(weight, state, clock, touched, directory, file)),
        dim_(weight.shape(1)),
        own_rank_(own_rank),
        applied_(std::move(applied)) {
    check_shape(applied_, "applied", {-1});
  }

  // copies: the gradients may be changed before apply().
  void begin(const PyMessage& message, bool copies) {
    route_ = message.route;
    const int64_t begin = route_->first().at(own_rank_), n = route_->first().at(own_rank_ + 1) - begin;
    const int64_t *keys = route_->keys().data() + begin, *order = route_->order().data() + begin;
    check_shape(message.values, "values", {route_->num_positions(), dim_});
    grads_ = message.values;
    if (!copies) return reducer_.begin(message.step, keys, order, grads_.data(), n);
    copied_.resize(n * dim_);
    in_order_.resize(n);
    for (int64_t i = 0; i < n; ++i) {
      in_order_[i] = i;
      std::copy_n(grads_.data() + order[i] * dim_, dim_, copied_.data() + i * dim_);
    }
    reducer_.begin(message.step, keys, in_order_.data(), copied_.data(), n);
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
  int64_t dim_, own_rank_;
  Array<int64_t> applied_;
  std::shared_ptr<const Route> route_;  // of the open step, kept alive
  Array<float> grads_{0};
  std::vector<float> copied_;  // this rank's own
  std::vector<int64_t> in_order_;
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
      .def("begin", &PyStepReducer::begin, py::arg("message"), py::arg("copies"),
           "Begins a step with this rank's own Message; copies: its gradients may be changed before apply().")
      .def("poll", &PyStepReducer::poll)
      .def("apply", &PyStepReducer::apply, py::arg("optimizer"))
      .def_property_readonly("awaited", &PyStepReducer::awaited);
}

}  // namespace hetmpi
