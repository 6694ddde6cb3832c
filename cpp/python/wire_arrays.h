// The gradients that one rank sends to the owners in one step, for the parts of the core that write messages and rings.
#pragma once

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "owner/route.h"
#include "python/arrays.h"
#include "python/owner_arrays.h"
#include "wire/round.h"

namespace hetmpi {

// At s = 0 a gradient for each key of the route, and it ends the step; at s >= 1 sums, with clocks and counts.
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
