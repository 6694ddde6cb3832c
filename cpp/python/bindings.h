// The bindings, the only part that uses Python: each call adds a class, or a group of functions, to the module
// hetmpi._C. They check dtypes and shapes, release the GIL and call the core.
#pragma once

#include <pybind11/pybind11.h>

namespace hetmpi {

namespace py = pybind11;
using py::ssize_t;

void bind_functions(py::module_& m);
void bind_hashing(py::module_& m);  // compiled with HETMPI_HASHING (setup.py)
void bind_partition(py::module_& m);
void bind_optimizer(py::module_& m);
void bind_row_file(py::module_& m);
void bind_ring(py::module_& m);
void bind_push_applier(py::module_& m);
void bind_round(py::module_& m);
void bind_exchange(py::module_& m);
void bind_line(py::module_& m);
void bind_lines(py::module_& m);
void bind_spans(py::module_& m);
void bind_clients(py::module_& m);
void bind_id_map(py::module_& m);
void bind_sampler(py::module_& m);
void bind_distances(py::module_& m);
void bind_cuda_row_cache(py::module_& m);  // this and the next are compiled with HETMPI_CUDA (setup.py)
void bind_cuda_unique(py::module_& m);

}  // namespace hetmpi
