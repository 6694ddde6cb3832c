// The module hetmpi._C. RowOptimizer is bound before the classes whose signatures use it.
#include "python/bindings.h"

#ifdef HETMPI_CUDA
#include "cuda/cuda_cache.h"
#endif
#ifndef HETMPI_SOURCES
#define HETMPI_SOURCES ""
#endif

namespace hetmpi {
namespace {

void bind_gpu(py::module_& m) {
#ifdef HETMPI_CUDA
  m.attr("has_cuda") = true;
  m.def("gpu_problem", &gpu_problem, "Why no GPU can be used here; empty if one can.");
  bind_cuda_unique(m);
  bind_cuda_row_cache(m);
#else
  m.attr("has_cuda") = false;
  m.def(
      "gpu_problem", [] { return "hetmpi._C has no GPU half: HETMPI_CUDA=1 ./run.sh setup compiles it"; },
      "Why no GPU can be used here.");
#endif
}

}  // namespace
}  // namespace hetmpi

PYBIND11_MODULE(_C, m) {
  using namespace hetmpi;
  m.doc() = "C++ core of hetmpi: unique keys, rows, row optimizers, rings between ranks, samples of graphs.";
  m.attr("SOURCES") = HETMPI_SOURCES;  // identifies the core's sources; empty where they were compiled without setup.py
  bind_functions(m);
#ifdef HETMPI_HASHING
  bind_hashing(m);
#endif
  bind_partition(m);
  bind_optimizer(m);
  bind_row_file(m);
  bind_ring(m);
  bind_push_applier(m);
  bind_round(m);
  bind_line(m);
  bind_exchange(m);
  bind_lines(m);
  bind_spans(m);
  bind_clients(m);
  bind_id_map(m);
  bind_sampler(m);
  bind_distances(m);
  bind_gpu(m);
}
