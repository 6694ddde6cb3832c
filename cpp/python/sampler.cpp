// Sampled neighbourhoods of nodes, and lists of ids by node.
#include "graph/sampler.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "python/arrays.h"
#include "python/bindings.h"

namespace hetmpi {
namespace {

// The array (n) of a vector, without a copy.
Array<int64_t> array_of(std::vector<int64_t>&& values) {
  auto owner = std::make_unique<std::vector<int64_t>>(std::move(values));
  auto* kept = owner.release();
  const py::capsule free(kept, [](void* pointer) { delete static_cast<std::vector<int64_t>*>(pointer); });
  return Array<int64_t>(kept->size(), kept->data(), free);
}

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
void bind(py::module_& m) {
  m.def("sample_neighbours", &sample<Index>, py::arg("indptr").noconvert(), py::arg("indices").noconvert(),
        py::arg("heads").noconvert(), py::arg("positions").noconvert(), py::arg("fanouts"), py::arg("replace"),
        py::arg("seed"), py::arg("stream"),
        "Sampled neighbourhoods (cpp/graph/sampler.h) of heads (B,) int64 at positions (B,) int64 of a stream -> nodes "
        "(N,) int64, the heads first, and per fan-out offsets (n + 1,) int64, index (e,) int64 into nodes, for the "
        "first n nodes. indptr (num_nodes + 1,) int64, indices (num_edges,) int32 or int64. Thread-safe.");
  m.def("lists_of", &lists_of<Index>, py::arg("offsets").noconvert(), py::arg("values").noconvert(),
        py::arg("rows").noconvert(),
        "Lists of rows (n,) int64 -> offsets (n + 1,) int64 from 0, values int64. The list of row i is "
        "values[offsets[i]:offsets[i + 1]]; offsets int64, values int32 or int64.");
}

}  // namespace

void bind_sampler(py::module_& m) {
  m.attr("SAMPLE_WINDOW") = Sampler::kWindow;
  bind<int32_t>(m);
  bind<int64_t>(m);
}

}  // namespace hetmpi
