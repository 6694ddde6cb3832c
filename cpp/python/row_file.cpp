// RowFile and PageKeeper on numpy arrays, which the caller keeps alive.
#include "owner/row_file.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "python/arrays.h"
#include "python/bindings.h"

namespace hetmpi {
namespace {

std::unique_ptr<RowFile> opened(int file, int before, int ballast, int64_t num_rows, int64_t dim, int64_t state_dim,
                                Array<uint8_t> rows, Array<uint8_t> pages, Array<int64_t> counts,
                                const Partition& partition, int64_t owner, uint64_t seed, float std,
                                int64_t budget_pages) {
  const RowFile::Form form{num_rows, dim, state_dim};
  check_shape(rows, "rows", {num_rows});
  check_shape(pages, "pages", {RowFile::bytes(form) / static_cast<int64_t>(kPage)});
  check_shape(counts, "counts", {kNumFileCounts});
  const RowFile::Marks marks{rows.mutable_data(), pages.mutable_data(), counts.mutable_data()};
  return std::make_unique<RowFile>(file, before, ballast, form, marks, RowFile::Init{partition, owner, seed, std},
                                   budget_pages);
}

// Rows (n) as they are, or as they were frozen, to out (n, width).
void copy(const RowFile& file, const Array<int64_t>& rows, bool is_state, bool is_frozen, Array<float> out) {
  const ssize_t n = rows.shape(0);
  check_in(rows.data(), n, file.form().num_rows, "rows");
  check_shape(out, "out", {n, is_state ? file.form().state_dim : file.form().dim});
  const int64_t* row = rows.data();
  float* to = out.mutable_data();
  if (file.is_closed() && !is_frozen) throw std::runtime_error("the table is closed");
  py::gil_scoped_release release;
  is_frozen ? file.copy_frozen(row, n, is_state, to) : file.copy(row, n, is_state, to);
}

// Writes weight or state (n, width) of rows (n), but not what absent rows have anyhow.
void assign(RowFile& file, const Array<int64_t>& rows, bool is_state, const Array<float>& values) {
  const ssize_t n = rows.shape(0), width = is_state ? file.form().state_dim : file.form().dim;
  check_in(rows.data(), n, file.form().num_rows, "rows");
  check_shape(values, "values", {n, width});
  const int64_t* row = rows.data();
  const float* from = values.data();
  py::gil_scoped_release release;
  file.want(row, n);
  for (ssize_t i = 0; i < n; ++i)
    if (!file.has_first_value(row[i], is_state, from + i * width))
      std::copy_n(from + i * width, width, file.to_write(row[i]) + (is_state ? file.form().dim : 0));
}

void want(const RowFile& file, const Array<int64_t>& rows) {
  check_in(rows.data(), rows.shape(0), file.form().num_rows, "rows");
  file.want(rows.data(), rows.shape(0));
}

}  // namespace

void bind_row_file(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const std::system_error& problem) {
      PyErr_SetObject(PyExc_OSError, py::make_tuple(problem.code().value(), problem.what()).ptr());
    }
  });
  m.def(
      "row_file_bytes",
      [](int64_t num_rows, int64_t dim, int64_t state_dim) { return RowFile::bytes({num_rows, dim, state_dim}); },
      py::arg("num_rows"), py::arg("dim"), py::arg("state_dim"), "Bytes of a RowFile, before its rows take disk.");
  m.attr("FILE_PAGE_BYTES") = kPage;
  m.attr("NUM_FILE_COUNTS") = static_cast<int>(kNumFileCounts);
  m.def("disk_waits", &disk_waits, "How often this thread has waited for a disk.");
  py::class_<RowFile>(m, "RowFile", "The rows of a shard in a file (cpp/owner/row_file.h).")
      .def(py::init(&opened), py::arg("file"), py::arg("before"), py::arg("ballast"), py::arg("num_rows"),
           py::arg("dim"), py::arg("state_dim"), py::arg("rows").noconvert(), py::arg("pages").noconvert(),
           py::arg("counts").noconvert(), py::arg("partition"), py::arg("owner"), py::arg("seed"), py::arg("std"),
           py::arg("budget_pages"), py::keep_alive<1, 8>(), py::keep_alive<1, 9>(), py::keep_alive<1, 10>())
      .def("copy", &copy, py::arg("rows").noconvert(), py::arg("is_state"), py::arg("is_frozen"),
           py::arg("out").noconvert())
      .def("assign", &assign, py::arg("rows").noconvert(), py::arg("is_state"), py::arg("values").noconvert())
      .def("want", &want, py::arg("rows").noconvert(), "Begins to read the pages of rows (n,) int64.")
      .def("freeze", &RowFile::freeze)
      .def("close", &RowFile::close, py::call_guard<py::gil_scoped_release>())
      .def("thaw", &RowFile::thaw, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("resident_pages", [](const RowFile& file) { return file.count(kResidentPages); })
      .def_property_readonly("pages_read", [](const RowFile& file) { return file.count(kPagesRead); })
      .def_property_readonly("pages_written", [](const RowFile& file) { return file.count(kPagesWritten); })
      .def_property_readonly("pages_allocated", [](const RowFile& file) { return file.count(kPagesAllocated); })
      .def_property_readonly("is_full", [](const RowFile& file) { return file.count(kBallastUsed) > 0; });
  py::class_<PageKeeper>(m, "PageKeeper", "The threads that read and drop pages (cpp/owner/row_file.h).")
      .def(py::init<std::vector<RowFile*>>(), py::arg("files"), py::keep_alive<1, 2>())
      .def("stop", &PageKeeper::stop, py::call_guard<py::gil_scoped_release>());
}

}  // namespace hetmpi
