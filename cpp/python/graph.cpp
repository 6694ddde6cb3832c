// Samples of graphs, lists of ids by node, distances of rows.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "graph/distances.h"
#include "graph/sampler.h"
#include "python/arrays.h"
#include "python/bindings.h"

namespace hetmpi {
namespace {

// Not inlined: the address of thread-local memory would be looked up at each access.
[[gnu::noinline]] Sampler& sampler_of_thread() {
  static thread_local Sampler sampler;
  return sampler;
}

template <typename Index>
py::tuple sample(const Array<int64_t>& indptr, const Array<Index>& indices, const Array<int64_t>& heads,
                 const Array<int64_t>& positions, const std::vector<int64_t>& fanouts, bool with_replacement,
                 uint64_t seed, uint64_t stream) {
  check_shape(indptr, "indptr", {-1});
  check_shape(indices, "indices", {-1});
  check_shape(heads, "heads", {-1});
  check_shape(positions, "positions", {heads.shape(0)});
  if (indptr.shape(0) < 1) throw std::invalid_argument("indptr must have num_nodes + 1 offsets, got none");
  for (int64_t fanout : fanouts)
    if (fanout < 1) throw std::invalid_argument("fan-outs must be at least 1, got " + std::to_string(fanout));
  const Adjacency<Index> graph{indptr.data(), indices.data(), indptr.shape(0) - 1, indices.shape(0)};
  const int64_t *head = heads.data(), *position = positions.data(), n = heads.shape(0);
  Sampler& sampler = sampler_of_thread();
  {
    py::gil_scoped_release release;
    sampler.sample(graph, head, position, n, fanouts, with_replacement, seed, stream);
  }
  py::list blocks;
  for (Block& block : sampler.blocks())
    blocks.append(py::make_tuple(array_of(std::move(block.offsets)), array_of(std::move(block.index))));
  return py::make_tuple(array_of(std::move(sampler.nodes())), blocks);
}

template <typename Value>
py::tuple lists_of(const Array<int64_t>& offsets, const Array<Value>& values, const Array<int64_t>& rows) {
  check_shape(offsets, "offsets", {-1});
  check_shape(values, "values", {-1});
  check_shape(rows, "rows", {-1});
  const ssize_t n = rows.shape(0), num_lists = offsets.shape(0) - 1, num_values = values.shape(0);
  Array<int64_t> out_offsets(n + 1);
  const int64_t *row = rows.data(), *offset = offsets.data();
  int64_t* out_offset = out_offsets.mutable_data();
  {
    py::gil_scoped_release release;
    check_in(row, n, num_lists, "rows");
    out_offset[0] = 0;
    for (ssize_t i = 0; i < n; ++i) {
      const int64_t first = offset[row[i]], last = offset[row[i] + 1];
      if (first < 0 || first > last || last > num_values)
        throw std::out_of_range("offsets must rise from 0 to " + std::to_string(num_values));
      out_offset[i + 1] = out_offset[i] + last - first;
    }
  }
  Array<int64_t> out(out_offset[n]);
  int64_t* to = out.mutable_data();
  const Value* value = values.data();
  {
    py::gil_scoped_release release;
    gather_lists(offset, value, row, n, out_offset, to);
  }
  return py::make_tuple(out_offsets, out);
}

template <typename Index>
void bind_samples(py::module_& m) {
  m.def("sample_neighbours", &sample<Index>, as_is("indptr"), as_is("indices"), as_is("heads"), as_is("positions"),
        "fanouts"_a, "replace"_a, "seed"_a, "stream"_a,
        "Sampled neighbourhoods (cpp/graph/sampler.h) of heads (B,) int64 at positions (B,) int64 of a stream -> nodes "
        "(N,) int64, the heads first, and per fan-out offsets (n + 1,) int64, index (e,) int64 into nodes, for the "
        "first n nodes. indptr (num_nodes + 1,) int64, indices (num_edges,) int32 or int64. Thread-safe.");
  m.def("lists_of", &lists_of<Index>, as_is("offsets"), as_is("values"), as_is("rows"),
        "Lists of rows (n,) int64 -> offsets (n + 1,) int64 from 0, values int64. The list of row i is "
        "values[offsets[i]:offsets[i + 1]]; offsets int64, values int32 or int64.");
}

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

void bind_graph(py::module_& m) {
  m.attr("SAMPLE_WINDOW") = Sampler::kWindow;
  bind_samples<int32_t>(m);
  bind_samples<int64_t>(m);
  m.def("distances", &distances, "kind"_a, as_is("rows"), as_is("others"), "num_threads"_a,
        "Distances (n, m) float32 of rows (n, dim) and others (m, dim) float32. kind: absolute, the sum of absolute "
        "differences; euclidean; moduli, the sum of moduli of complex differences, of rows whose first half are the "
        "real parts.");
  m.def("distance_gradients", &gradients, "kind"_a, as_is("rows"), as_is("others"), as_is("distances"), as_is("grads"),
        "num_threads"_a,
        "Gradients of rows and others, given distances (n, m) and their gradients. That of a difference of 0 is 0.");
}

}  // namespace hetmpi
