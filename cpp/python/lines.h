// Rows and gradients as tensors.
#pragma once

#include <cstdint>

#include "client/lines.h"
#include "python/bindings.h"

namespace hetmpi {

// As a tensor (n, dim), in the same memory.
py::object object_of(const ModelRows& rows, int64_t dim);

// The rows of a tensor (n, dim), where these lines read them.
ModelRows rows_of(const py::object& tensor, const Lines& lines);

// The rows of a tensor (n, dim) in host memory.
Buffer<float> host_rows_of(const py::object& tensor, int64_t dim);

}  // namespace hetmpi
