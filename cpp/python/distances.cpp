// Distances of all pairs of rows, and their gradients.
#include "graph/distances.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "python/arrays.h"
#include "python/bindings.h"

namespace hetmpi {
namespace {

Distance kind_of(const std::string& name, int64_t dim) {
  if (name == "moduli" && dim % 2 != 0)
    throw std::invalid_argument("rows must have real and imaginary parts, got " + std::to_string(dim) + " numbers");
  if (name == "absolute") return Distance::kAbsolute;
  if (name == "euclidean") return Distance::kEuclidean;
  if (name == "moduli") return Distance::kModuli;
  throw std::invalid_argument("kind must be absolute, euclidean or moduli, got " + name);
}

RowPairs pairs_of(const Array<float>& rows, const Array<float>& others) {
  check_shape(rows, "rows", {-1, -1});
  check_shape(others, "others", {-1, rows.shape(1)});
  return {rows.data(), others.data(), rows.shape(0), others.shape(0), rows.shape(1)};
}

Array<float> distances(const std::string& name, const Array<float>& rows, const Array<float>& others,
                       int64_t num_threads) {
  const RowPairs pairs = pairs_of(rows, others);
  const Distance kind = kind_of(name, pairs.dim);
  Array<float> out({pairs.n, pairs.num});
  float* to = out.mutable_data();
  {
    py::gil_scoped_release release;
    in_threads(pairs.n, num_threads, [=](int64_t begin, int64_t end) {
      all_distances(kind, {pairs.rows + begin * pairs.dim, pairs.others, end - begin, pairs.num, pairs.dim},
                    to + begin * pairs.num);
    });
  }
  return out;
}

py::tuple gradients(const std::string& name, const Array<float>& rows, const Array<float>& others,
                    const Array<float>& distances, const Array<float>& grads, int64_t num_threads) {
  const RowPairs pairs = pairs_of(rows, others);
  const Distance kind = kind_of(name, pairs.dim);
  check_shape(distances, "distances", {pairs.n, pairs.num});
  check_shape(grads, "grads", {pairs.n, pairs.num});
  Array<float> of_rows({pairs.n, pairs.dim}), of_others({pairs.num, pairs.dim});
  const float *distance = distances.data(), *grad = grads.data();
  float *of_row = of_rows.mutable_data(), *of_other = of_others.mutable_data();
  {
    py::gil_scoped_release release;
    std::fill_n(of_row, pairs.n * pairs.dim, 0.0f);
    std::fill_n(of_other, pairs.num * pairs.dim, 0.0f);
    const int64_t num_places = kind == Distance::kModuli ? pairs.dim / 2 : pairs.dim;
    in_threads(num_places, num_threads, [=](int64_t begin, int64_t end) {
      add_all_gradients(kind, pairs, distance, grad, begin, end, of_row, of_other);
    });
  }
  return py::make_tuple(of_rows, of_others);
}

}  // namespace

void bind_distances(py::module_& m) {
  m.def("distances", &distances, py::arg("kind"), py::arg("rows").noconvert(), py::arg("others").noconvert(),
        py::arg("num_threads"),
        "Distances (n, m) float32 of rows (n, dim) and others (m, dim) float32. kind: absolute, the sum of absolute "
        "differences; euclidean; moduli, the sum of moduli of complex differences, of rows whose first half are the "
        "real parts.");
  m.def("distance_gradients", &gradients, py::arg("kind"), py::arg("rows").noconvert(), py::arg("others").noconvert(),
        py::arg("distances").noconvert(), py::arg("grads").noconvert(), py::arg("num_threads"),
        "Gradients of rows and others, given distances (n, m) and their gradients. That of a difference of 0 is 0.");
}

}  // namespace hetmpi
