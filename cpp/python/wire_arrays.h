// Messages and gradients in numpy arrays, for the parts of the core that send them.
#pragma once

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "owner/route.h"
#include "python/arrays.h"
#include "python/owner_arrays.h"
#include "wire/round.h"
#include "wire/server.h"

namespace hetmpi {

// Keeps Python's object until the core needs it no more, in whichever thread.
template <typename Object>
std::shared_ptr<Object> kept(Object object) {
  const auto free = [](Object* of) {
    py::gil_scoped_acquire acquire;
    delete of;
  };
  return std::shared_ptr<Object>(new Object(std::move(object)), free);
}

inline Words words_in(Array<int64_t> message) {
  check_shape(message, "message", {-1});
  const int64_t* at = message.data();
  const auto num = static_cast<int64_t>(message.shape(0));
  return {at, num, kept(std::move(message))};
}

inline Array<int64_t> array_of(Words words) {
  const int64_t *at = words.at, num = words.num;
  auto* owner = new Words(std::move(words));
  return Array<int64_t>(num, at, py::capsule(owner, [](void* of) { delete static_cast<Words*>(of); }));
}

// The gradients that one rank sends to the owners in one step. At s = 0 a gradient for each key of the route, and it
// ends the step; at s >= 1 sums, with clocks and counts.
struct PyMessage {
  int64_t step;
  std::shared_ptr<const Route> route;
  Array<float> values;
  std::optional<Array<int32_t>> clocks, counts, steps;

  // As long as these arrays live.
  PushView view(RecordFormat format) const { return {step, route->view(), columns(format), !format.has_clocks}; }

  Message columns(RecordFormat format) const {
    check_shape(values, "values", {route->num_positions(), format.width});
    if (clocks) check_shape(*clocks, "clocks", {values.shape(0)});
    if (counts) check_shape(*counts, "counts", {values.shape(0)});
    if (steps) check_shape(*steps, "steps", {values.shape(0), 2});
    return {route->keys().data(), column(clocks, "clocks", format.has_clocks),
            column(counts, "counts", format.has_clocks), column(steps, "steps", format.has_steps), values.data()};
  }
};

}  // namespace hetmpi
