// Hashes of texts and numbers.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "data/hashes.h"
#include "python/arrays.h"
#include "python/bindings.h"

namespace hetmpi {
namespace {

Array<int64_t> hashes_of_texts(const Array<int32_t>& offsets, const Array<uint8_t>& data, uint64_t seed,
                               std::vector<std::string> missing) {
  check_shape(offsets, "offsets", {-1});
  check_shape(data, "data", {-1});
  Array<int64_t> hashes(std::max<ssize_t>(offsets.shape(0) - 1, 0));
  const ssize_t n = hashes.shape(0), size = data.shape(0);
  const int32_t* offset = offsets.data();
  const char* text = reinterpret_cast<const char*>(data.data());
  int64_t* out = hashes.mutable_data();
  py::gil_scoped_release release;
  hash_texts(offset, n, text, size, seed, Missing(std::move(missing)), out);
  return hashes;
}

template <typename Number>
Array<int64_t> hashes_of_numbers(const Array<Number>& values, uint64_t seed) {
  check_shape(values, "values", {-1});
  Array<int64_t> hashes(values.shape(0));
  const Number* value = values.data();
  int64_t* out = hashes.mutable_data();
  const ssize_t n = values.shape(0);
  py::gil_scoped_release release;
  hash_numbers(value, n, seed, out);
  return hashes;
}

void add_hashes(Array<uint8_t> registers, const Array<int64_t>& hashes) {
  check_shape(registers, "registers", {1 << kIndexBits});
  check_shape(hashes, "hashes", {-1});
  const int64_t* hash = hashes.data();
  const ssize_t n = hashes.shape(0);
  uint8_t* most = registers.mutable_data();
  py::gil_scoped_release release;
  observe(hash, n, most);
}

}  // namespace

void bind_hashing(py::module_& m) {
  m.def("hash_texts", &hashes_of_texts, as_is("offsets"), as_is("data"), "seed"_a, "missing"_a,
        "Upper 63 bits of xxh3_64 of texts data[offsets[i] : offsets[i + 1]] (n,), without spaces around them and in "
        "canonical form (cpp/data/canonical_text.h); a text in `missing` counts as empty. offsets (n + 1,) int32, data "
        "(m,) uint8.");
  m.def("hash_floats", &hashes_of_numbers<float>, as_is("values"), "seed"_a,
        "As hash_texts of the canonical texts of values (n,) float32 or float64.");
  m.def("hash_floats", &hashes_of_numbers<double>, as_is("values"), "seed"_a);
  m.def("hash_integers", &hashes_of_numbers<int64_t>, as_is("values"), "seed"_a,
        "As hash_texts of the decimal texts of values (n,) int64.");
  m.def("observe", &add_hashes, as_is("registers"), as_is("hashes"),
        "Adds hashes (n,) int64, 0 <= hash < 2^63, to HyperLogLog registers (2^14,) uint8.");
}

}  // namespace hetmpi
