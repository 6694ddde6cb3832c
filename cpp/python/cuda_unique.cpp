// CudaUnique: distinct keys on a GPU.
#include "cuda/cuda_unique.h"

#include <cstdint>

#include "python/bindings.h"
#include "python/cuda_arrays.h"

namespace hetmpi {
namespace {

// CudaUnique for Python.
class PyCudaUnique {
 public:
  explicit PyCudaUnique(int device) : unique_(device) {}

  int64_t unique(const py::object& ids, int64_t limit, const py::object& keys, const py::object& index,
                 uintptr_t stream) {
    const ssize_t n = length_of(ids);
    const auto* id = memory_of<const int64_t>(ids, "ids", {n}, unique_.device());
    auto *key = memory_of<int64_t>(keys, "keys", {n}, unique_.device()),
         *at = memory_of<int64_t>(index, "index", {n}, unique_.device());
    py::gil_scoped_release release;
    return unique_.unique(id, n, limit, key, at, stream_of(stream));
  }

 private:
  CudaUnique unique_;
};

}  // namespace

void bind_cuda_unique(py::module_& m) {
  py::class_<PyCudaUnique>(m, "CudaUnique", "Unique keys of a batch on a GPU (cpp/cuda/cuda_unique.h).")
      .def(py::init<int>(), py::arg("device") = 0)
      .def("unique", &PyCudaUnique::unique, py::arg("ids"), py::arg("limit"), py::arg("keys"), py::arg("index"),
           py::arg("stream"),
           "ids (n,) below limit -> keys (n,), of which it returns how many it fills, index (n,); as _C.unique.");
}

}  // namespace hetmpi
