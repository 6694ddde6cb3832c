// Hashes of texts and numbers, the ids of tabular data, and registers that count distinct ones (HyperLogLog).
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#define XXH_INLINE_ALL
#include "arrow/vendored/xxhash/xxhash.h"
#include "data/canonical_text.h"

namespace hetmpi {

constexpr int kIndexBits = 14;  // INDEX_BITS in hetmpi/data/distinct.py

// Upper 63 bits of xxh3_64.
inline int64_t hash_of(std::string_view text, uint64_t seed) {
  return static_cast<int64_t>(XXH3_64bits_withSeed(text.data(), text.size(), seed) >> 1);
}

// The texts that count as missing, all shorter than most others, so that a comparison of lengths decides.
class Missing {
 public:
  explicit Missing(std::vector<std::string> texts) : texts_(std::move(texts)) {
    for (const auto& text : texts_) longest_ = std::max(longest_, text.size());
  }

  bool contains(std::string_view text) const {
    if (text.size() > longest_) return false;
    return std::find(texts_.begin(), texts_.end(), text) != texts_.end();
  }

 private:
  std::vector<std::string> texts_;
  size_t longest_ = 0;
};

inline std::string_view without_spaces(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

// Of the texts data[offsets[i], offsets[i + 1]) (n), where `data` has `size` bytes.
inline void hash_texts(const int32_t* offsets, int64_t n, const char* data, int64_t size, uint64_t seed,
                       const Missing& missing, int64_t* hashes) {
  CanonicalText canonical;
  for (int64_t i = 0; i < n; ++i) {
    if (offsets[i] < 0 || offsets[i + 1] < offsets[i] || offsets[i + 1] > size)
      throw std::out_of_range("offsets must rise from 0 to the size of data");
    const std::string_view value =
        without_spaces({data + offsets[i], static_cast<size_t>(offsets[i + 1] - offsets[i])});
    hashes[i] = hash_of(missing.contains(value) ? std::string_view() : canonical.of(value), seed);
  }
}

// Of the texts of numbers (n): float, double or int64_t.
template <typename Number>
void hash_numbers(const Number* values, int64_t n, uint64_t seed, int64_t* hashes) {
  CanonicalText canonical;
  char text[24];
  for (int64_t i = 0; i < n; ++i) {
    if constexpr (std::is_floating_point_v<Number>)
      hashes[i] = hash_of(canonical.of_number(values[i]), seed);
    else
      hashes[i] =
          hash_of({text, static_cast<size_t>(std::to_chars(text, text + sizeof text, values[i]).ptr - text)}, seed);
  }
}

// Adds hashes (n), 0 <= hash < 2^63, to registers (2^kIndexBits).
inline void observe(const int64_t* hashes, int64_t n, uint8_t* registers) {
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t bits = static_cast<uint64_t>(hashes[i]) << 1;
    const uint64_t rest =
        (bits << kIndexBits) | (uint64_t{1} << (kIndexBits - 1));  // the set bit ends the run of zeros
    uint8_t& one = registers[bits >> (64 - kIndexBits)];
    one = std::max(one, static_cast<uint8_t>(__builtin_clzll(rest) + 1));
  }
}

}  // namespace hetmpi
