// The module hetmpi._C. Classes are bound before those whose signatures use them.
#include "python/bindings.h"

#ifndef HETMPI_SOURCES
#define HETMPI_SOURCES ""
#endif

PYBIND11_MODULE(_C, m) {
  using namespace hetmpi;
  m.doc() = "C++ core of hetmpi: unique keys, rows, row optimizers, rings between ranks, samples of graphs.";
  m.attr("SOURCES") = HETMPI_SOURCES;  // identifies the core's sources; empty where they were compiled without setup.py
  bind_functions(m);
#ifdef HETMPI_HASHING
  bind_hashing(m);
#endif
  bind_owner(m);
  bind_wire(m);
  bind_spans(m);
  bind_client(m);
  bind_graph(m);
  m.attr("has_cuda") = bind_cuda != nullptr;
  if (bind_cuda != nullptr)
    bind_cuda(m);
  else
    m.def(
        "gpu_problem", [](int) { return "hetmpi._C has no GPU half: HETMPI_CUDA=1 ./run.sh setup compiles it"; },
        "device"_a = 0, "Why this GPU cannot be used.");
}
