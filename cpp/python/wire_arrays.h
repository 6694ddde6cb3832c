// The arrays of routes and pushes, for the parts of the core that write messages and rings.
#pragma once

#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>

#include "python/arrays.h"
#include "python/owner_arrays.h"
#include "wire/round.h"

namespace hetmpi {

struct RouteArrays {
  Array<int64_t> order, keys, first;

  RouteView view() const { return {order.data(), keys.data(), first.data()}; }

  // num: numbers of positions.
  void check(ssize_t num) const {
    check_shape(keys, "keys", {order.shape(0)});
    check_shape(first, "first", {-1});
    if (first.data()[0] != 0 || first.data()[first.shape(0) - 1] != order.shape(0))
      throw std::invalid_argument("first must rise from 0 to the number of keys");
    check_in(order.data(), order.shape(0), num, "order");
  }
};

struct PushArrays {
  int64_t step;
  RouteArrays route;
  Array<float> values;
  std::optional<Array<int32_t>> clocks, counts, steps;
  bool ends_step;

  // As long as these arrays live.
  PushView view(RecordFormat format) const {
    route.check(values.shape(0));
    return {step, route.view(), message_of(route.keys, values, route.order, clocks, counts, steps, format), ends_step};
  }
};

}  // namespace hetmpi
