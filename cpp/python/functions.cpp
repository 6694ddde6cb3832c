// Functions on keys and rows: distinct keys, initial values, gather, sum_by_row, spread_add.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "data/table_keys.h"
#include "key_index.h"
#include "owner/huge_pages.h"
#include "owner/row_init.h"
#include "owner/shard.h"
#include "python/arrays.h"
#include "python/bindings.h"
#include "vectors.h"

namespace hetmpi {
namespace {

// Of the last call of unique(), unique_of_tables() or position_of_repeated(), which finds them again.
thread_local KeyIndex distinct_keys;
// Of the last call of note_distinct(), likewise.
thread_local std::vector<int64_t> distinct_elsewhere;

void note_distinct(const Array<int64_t>& keys) {
  check_shape(keys, "keys", {-1});
  distinct_elsewhere.assign(keys.data(), keys.data() + keys.size());
}

py::tuple unique(const Array<int64_t>& ids) {
  check_shape(ids, "ids", {-1});
  const ssize_t n = ids.shape(0);
  Array<int64_t> index(n);
  KeyIndex& seen = distinct_keys;
  {
    const int64_t* in = ids.data();
    int64_t* out = index.mutable_data();
    py::gil_scoped_release release;
    seen.number_all(in, n, out);
  }
  Array<int64_t> keys(seen.size());
  std::copy(seen.keys().begin(), seen.keys().end(), keys.mutable_data());
  return py::make_tuple(keys, index);
}

py::list unique_of_tables(const Array<int64_t>& ids, const std::vector<std::vector<int64_t>>& columns,
                          const std::vector<std::vector<Array<int64_t>>>& lists, Array<int64_t> index) {
  static thread_local TableKeys found;
  check_shape(ids, "ids", {-1, -1});
  check_shape(index, "index", {ids.shape(0), ids.shape(1)});
  const ssize_t n = ids.shape(0), width = ids.shape(1);
  const KeyIndex& seen = distinct_keys;
  py::list of_tables;
  int64_t first = 0;
  for (size_t i = 0; i < columns.size(); ++i, first += seen.size()) {
    check_in(columns[i].data(), static_cast<ssize_t>(columns[i].size()), width, "columns");
    std::vector<TableKeys::List> values;
    for (const auto& list : lists.at(i)) values.emplace_back(list.data(), list.size());
    const int64_t* id = ids.data();
    int64_t* out = index.mutable_data();
    {
      py::gil_scoped_release release;
      found.take(&distinct_keys, id, n, width, columns[i], values, first, out);
    }
    py::list of_lists;
    const int64_t* numbers = found.numbers().data() + n * static_cast<ssize_t>(columns[i].size());
    for (const auto& [_, num] : values) {
      of_lists.append(Array<int64_t>(num, numbers));
      numbers += num;
    }
    of_tables.append(py::make_tuple(Array<int64_t>(seen.size(), seen.keys().data()),
                                    Array<int64_t>(seen.size(), found.counts().data()), of_lists));
  }
  return of_tables;
}

int64_t first_repeated(const Array<int64_t>& keys) {
  check_shape(keys, "keys", {-1});
  const int64_t *key = keys.data(), n = keys.size();
  py::gil_scoped_release release;
  return position_of_repeated(key, n);
}

bool all_finite(const Array<float>& values) {
  const float* value = values.data();
  const ssize_t n = values.size();
  py::gil_scoped_release release;
  return is_finite(value, n);
}

// The same memory (n,) at addresses that huge pages need; populates it if this process is the first to use it.
Array<uint8_t> aligned_view(Array<uint8_t> memory, bool populates) {
  auto view = std::make_unique<AlignedView>(memory.mutable_data(), memory.nbytes());
  if (populates) {
    py::gil_scoped_release release;
    view->populate();
  }
  auto* const data = static_cast<uint8_t*>(view->data());
  const py::capsule owner(view.release(), [](void* held) { delete static_cast<AlignedView*>(held); });
  return Array<uint8_t>(memory.nbytes(), data, owner);
}

void init_rows(Array<float> weight, const Array<int64_t>& keys, uint64_t seed, float std) {
  check_shape(weight, "weight", {keys.shape(0), -1});
  const ssize_t n = keys.shape(0), dim = weight.shape(1);
  float* out = weight.mutable_data();
  const int64_t* key = keys.data();
  py::gil_scoped_release release;
  for (ssize_t i = 0; i < n; ++i) init_row(out + i * dim, dim, key[i], seed, std);
}

void gather_rows(const Array<float>& weight, const Array<int64_t>& rows, Array<float> out) {
  check_shape(weight, "weight", {-1, -1});
  check_shape(rows, "rows", {-1});
  const ssize_t n = rows.shape(0), num_rows = weight.shape(0), dim = weight.shape(1);
  check_shape(out, "out", {n, dim});
  const float* from = weight.data();
  const int64_t* row = rows.data();
  float* to = out.mutable_data();
  py::gil_scoped_release release;
  check_in(row, n, num_rows, "row numbers");
  gather(from, row, n, dim, to);
}

// values: its rows may lie apart.
void sum_rows(const py::array_t<float, 0>& values, const Array<int64_t>& rows, Array<float> sums) {
  check_shape(rows, "rows", {-1});
  check_shape(sums, "sums", {-1, -1});
  const ssize_t n = rows.shape(0), dim = sums.shape(1), num_rows = sums.shape(0);
  check_shape(values, "values", {-1, -1});
  const ssize_t num_parts = values.shape(0), size = values.shape(1), of_part = dim > 0 ? size / dim : 0;
  const auto width = static_cast<ssize_t>(sizeof(float));
  const bool is_contiguous = n == 0 || ((size < 2 || values.strides(1) == width) && values.strides(0) % width == 0);
  if (num_parts * of_part != n || of_part * dim != size || !is_contiguous)
    throw std::invalid_argument("values must have shape (k, m * dim) for k * m rows, and its rows be contiguous");
  const float* value = values.data();
  const ssize_t stride = values.strides(0) / width;
  const int64_t* row = rows.data();
  float* to = sums.mutable_data();
  py::gil_scoped_release release;
  check_in(row, n, num_rows, "rows");
  sum_by_row(value, num_parts, of_part, stride, row, num_rows, dim, to);
}

void spread_add_rows(const Array<float>& values, const Array<int64_t>& offsets, const Array<int64_t>& rows,
                     Array<float> out) {
  check_shape(values, "values", {-1, -1});
  const ssize_t n = values.shape(0), dim = values.shape(1), num_out = out.shape(0);
  check_shape(offsets, "offsets", {n + 1});
  check_shape(rows, "rows", {-1});
  check_shape(out, "out", {-1, dim});
  const float* value = values.data();
  const int64_t *offset = offsets.data(), *row = rows.data();
  const ssize_t num_rows = rows.shape(0);
  float* to = out.mutable_data();
  py::gil_scoped_release release;
  bool rises = offset[0] == 0 && offset[n] == num_rows;
  for (ssize_t d = 0; d < n; ++d) rises = rises && offset[d] <= offset[d + 1];
  if (!rises) throw std::out_of_range("offsets must rise from 0 to the number of rows");
  check_in(row, num_rows, num_out, "rows");
  spread_add(value, offset, row, n, dim, to);
}

}  // namespace

int64_t position_of_repeated(const int64_t* keys, int64_t n) {
  const std::vector<int64_t>& known = distinct_elsewhere;
  if (n == static_cast<int64_t>(known.size()) && std::equal(known.begin(), known.end(), keys)) return -1;
  return distinct_keys.first_repeated(keys, n);
}

void bind_functions(py::module_& m) {
  m.def("unique", &unique, as_is("ids"),
        "ids (N,) int64 -> keys (U,) int64 in order of first appearance, index (N,) int64 with ids == keys[index].");
  m.def(
      "unique_of_tables", &unique_of_tables, as_is("ids"), "columns"_a, "lists"_a, as_is("index"),
      "Distinct keys of each table in a batch: those of its columns of ids (B, F) int64, row by row, then of its "
      "lists, each (n,) int64. Their numbers, counted on from table to table, go to the same columns of index (B, F). "
      "Returns of each table keys (U,) int64 in order of first appearance, how often each occurs (U,) int64, and the "
      "numbers of each list (n,) int64.");
  m.def("first_repeated", &first_repeated, as_is("keys"),
        "Position of the first of keys (n,) int64 that stands before in keys too, -1 if all are distinct.");
  m.def("note_distinct", &note_distinct, as_is("keys"),
        "These keys (n,) int64 are distinct: first_repeated() of them, next in this thread, need not look.");
  m.def("all_finite", &all_finite, as_is("values"),
        "Whether no number of values, a float32 array, is NaN or infinite.");
  m.attr("HUGE_PAGE_BYTES") = kHugePage;
  m.def("aligned_view", &aligned_view, as_is("memory"), "populates"_a,
        "Shared memory (n,) uint8 at addresses that huge pages need; populates: allocates it as such, where the kernel "
        "can, if it holds nothing yet (cpp/owner/huge_pages.h).");
  m.def("init_rows", &init_rows, as_is("weight"), as_is("keys"), "seed"_a, "std"_a,
        "weight (n, dim) float32 = std * normal(seed, key, column), for keys (n,) int64.");
  m.def("gather", &gather_rows, as_is("weight"), as_is("rows"), as_is("out"),
        "out[i] = weight[rows[i]]; float32 weight (m, dim) and out (n, dim), int64 rows (n,).");
  m.def(
      "sum_by_row", &sum_rows, as_is("values"), as_is("rows"), as_is("sums"),
      "sums[row] = sum of values[i] with rows[i] == row, i in order, 0 without any; float32 values (n, dim), given as "
      "(k, n / k * dim), and sums (m, dim), int64 rows (n,). Numbers of a row of `values` lie side by side.");
  m.def("spread_add", &spread_add_rows, as_is("values"), as_is("offsets"), as_is("rows"), as_is("out"),
        "out[rows[i]] += values[d] for offsets[d] <= i < offsets[d + 1], i in order; float32 values (n, dim) and out "
        "(m, dim), int64 offsets (n + 1,) and rows (e,).");
}

}  // namespace hetmpi
