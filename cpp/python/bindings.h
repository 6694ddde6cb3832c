// The bindings, the only part that uses Python: each call adds classes and functions, about those of a folder of cpp/,
// to the module hetmpi._C. They check dtypes and shapes, release the GIL and call the core.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>

namespace hetmpi {

namespace py = pybind11;
using py::ssize_t;

using namespace py::literals;
using WithoutGil = py::call_guard<py::gil_scoped_release>;

// An argument that is not converted: an array of another type or layout is refused, not copied.
inline py::arg as_is(const char* name) { return std::move(py::arg(name).noconvert()); }

// Position of the first key in keys (n) that has occurred before, -1 if all are distinct (functions.cpp).
int64_t position_of_repeated(const int64_t* keys, int64_t n);

void bind_functions(py::module_& m);
void bind_hashing(py::module_& m);  // compiled with HETMPI_HASHING (setup.py)
void bind_owner(py::module_& m);
void bind_wire(py::module_& m);
void bind_client(py::module_& m);
void bind_spans(py::module_& m);
void bind_graph(py::module_& m);
inline void (*bind_cuda)(py::module_& m) = nullptr;  // set by cuda.cpp, where that is compiled

}  // namespace hetmpi
