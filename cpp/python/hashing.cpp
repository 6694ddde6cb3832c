// Hashes of texts and integers, the ids of tabular data, and registers that count distinct ones (HyperLogLog).
#include <pybind11/stl.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#define XXH_INLINE_ALL
#include "arrow/vendored/xxhash/xxhash.h"
#include "data/canonical_text.h"
#include "python/arrays.h"
#include "python/bindings.h"

namespace hetmpi {
namespace {

constexpr int kIndexBits = 14;  // INDEX_BITS in hetmpi/data/distinct.py

int64_t hash_of(const char* text, size_t size, uint64_t seed) {
  return static_cast<int64_t>(XXH3_64bits_withSeed(text, size, seed) >> 1);
}

bool is_space(char c) { return c == ' ' || c == '\t'; }

// The texts that count as missing, all shorter than most others, so that a comparison of lengths decides.
class Missing {
 public:
  explicit Missing(std::vector<std::string> texts) : texts_(std::move(texts)) {
    for (const auto& text : texts_) longest_ = std::max(longest_, text.size());
  }

  bool contains(std::string_view text) const {
    if (text.size() > longest_) return false;
    for (const auto& one : texts_)
      if (text == one) return true;
    return false;
  }

 private:
  std::vector<std::string> texts_;
  size_t longest_ = 0;
};

std::string_view trimmed(const char* begin, const char* end) {
  while (begin < end && is_space(*begin)) ++begin;
  while (begin < end && is_space(end[-1])) --end;
  return {begin, static_cast<size_t>(end - begin)};
}

Array<int64_t> hash_texts(const Array<int32_t>& offsets, const Array<uint8_t>& data, uint64_t seed,
                          std::vector<std::string> missing_texts) {
  check_shape(offsets, "offsets", {-1});
  check_shape(data, "data", {-1});
  const ssize_t n = std::max<ssize_t>(offsets.shape(0) - 1, 0), size = data.shape(0);
  const int32_t* offset = offsets.data();
  const char* text = reinterpret_cast<const char*>(data.data());
  Array<int64_t> hashes(n);
  int64_t* out = hashes.mutable_data();
  const Missing missing(std::move(missing_texts));
  py::gil_scoped_release release;
  const int64_t none = hash_of("", 0, seed);
  CanonicalText canonical;
  for (ssize_t i = 0; i < n; ++i) {
    if (offset[i] < 0 || offset[i + 1] < offset[i] || offset[i + 1] > size)
      throw std::out_of_range("offsets must rise from 0 to the size of data");
    const std::string_view value = trimmed(text + offset[i], text + offset[i + 1]);
    const std::string_view one = missing.contains(value) ? std::string_view() : canonical.of(value);
    out[i] = one.empty() ? none : hash_of(one.data(), one.size(), seed);
  }
  return hashes;
}

template <typename Float>
Array<int64_t> hash_floats(const Array<Float>& values, uint64_t seed) {
  check_shape(values, "values", {-1});
  const ssize_t n = values.shape(0);
  const Float* value = values.data();
  Array<int64_t> hashes(n);
  int64_t* out = hashes.mutable_data();
  py::gil_scoped_release release;
  CanonicalText canonical;
  for (ssize_t i = 0; i < n; ++i) {
    const std::string_view one = canonical.of_number(value[i]);
    out[i] = hash_of(one.data(), one.size(), seed);
  }
  return hashes;
}

Array<int64_t> hash_integers(const Array<int64_t>& values, uint64_t seed) {
  check_shape(values, "values", {-1});
  const ssize_t n = values.shape(0);
  const int64_t* value = values.data();
  Array<int64_t> hashes(n);
  int64_t* out = hashes.mutable_data();
  py::gil_scoped_release release;
  char text[24];
  for (ssize_t i = 0; i < n; ++i) {
    const char* end = std::to_chars(text, text + sizeof text, value[i]).ptr;
    out[i] = hash_of(text, end - text, seed);
  }
  return hashes;
}

void observe(Array<uint8_t> registers, const Array<int64_t>& hashes) {
  check_shape(registers, "registers", {1 << kIndexBits});
  check_shape(hashes, "hashes", {-1});
  const ssize_t n = hashes.shape(0);
  const int64_t* hash = hashes.data();
  uint8_t* most = registers.mutable_data();
  py::gil_scoped_release release;
  for (ssize_t i = 0; i < n; ++i) {
    const uint64_t bits = static_cast<uint64_t>(hash[i]) << 1;
    const uint64_t rest =
        (bits << kIndexBits) | (uint64_t{1} << (kIndexBits - 1));  // the set bit ends the run of zeros
    uint8_t& one = most[bits >> (64 - kIndexBits)];
    one = std::max(one, static_cast<uint8_t>(__builtin_clzll(rest) + 1));
  }
}

}  // namespace

void bind_hashing(py::module_& m) {
  m.def("hash_texts", &hash_texts, as_is("offsets"), as_is("data"), "seed"_a, "missing"_a,
        "Upper 63 bits of xxh3_64 of texts data[offsets[i] : offsets[i + 1]] (n,), without spaces around them and in "
        "canonical form (cpp/data/canonical_text.h); a text in `missing` counts as empty. offsets (n + 1,) int32, data "
        "(m,) uint8.");
  m.def("hash_floats", &hash_floats<float>, as_is("values"), "seed"_a,
        "As hash_texts of the canonical texts of values (n,) float32 or float64.");
  m.def("hash_floats", &hash_floats<double>, as_is("values"), "seed"_a);
  m.def("hash_integers", &hash_integers, as_is("values"), "seed"_a,
        "As hash_texts of the decimal texts of values (n,) int64.");
  m.def("observe", &observe, as_is("registers"), as_is("hashes"),
        "Adds hashes (n,) int64, 0 <= hash < 2^63, to HyperLogLog registers (2^14,) uint8.");
}

}  // namespace hetmpi
