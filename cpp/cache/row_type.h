// Numbers of a row in 32 or 16 bits. Rounding uses integers only, so that CPU and GPU produce the same bits.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "key_index.h"
#include "portable.h"

namespace hetmpi {

enum class RowType : int32_t { kFloat32, kFloat16, kBfloat16 };

constexpr uint32_t kNearest = 0x8000;  // as the random number: rounds to nearest

inline RowType row_type_of(const std::string& name) {
  if (name == "float32") return RowType::kFloat32;
  if (name == "float16") return RowType::kFloat16;
  if (name == "bfloat16") return RowType::kBfloat16;
  throw std::invalid_argument("rows of a cache must be float32, float16 or bfloat16, got " + name);
}

HETMPI_SHARED int64_t bytes_of(RowType type) { return type == RowType::kFloat32 ? 4 : 2; }

HETMPI_SHARED uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

HETMPI_SHARED float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Converts 16 bits to 32.
HETMPI_SHARED float widened(uint16_t bits, RowType type) {
  if (type == RowType::kBfloat16) return float_of_bits(static_cast<uint32_t>(bits) << 16);
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) return float_of_bits(sign | 0x7f800000 | fraction << 13);
  if (exponent > 0) return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
  const float size = static_cast<float>(fraction) * 0x1p-24f;
  return sign != 0 ? -size : size;
}

// Converts 32 bits to 16 by stochastic rounding, unbiased for random numbers uniform below 2^16. Saturates at the
// largest number.
HETMPI_SHARED uint16_t narrowed(float value, RowType type, uint32_t random) {
  const uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  const bool is_bfloat = type == RowType::kBfloat16;
  const uint32_t infinite = is_bfloat ? 0x7f80 : 0x7c00, largest = infinite - 1;
  uint32_t narrow;
  if (size >= 0x7f800000) {
    narrow = size > 0x7f800000 ? infinite | 1 : infinite;
  } else if (is_bfloat) {
    narrow = (size + random) >> 16;
    if (narrow > largest) narrow = largest;
  } else if (size >= 0x38800000) {  // 2^-14: smaller numbers are subnormal in float16
    narrow = (size + (random >> 3) - 0x38000000) >> 13;
    if (narrow > largest) narrow = largest;
  } else {
    narrow = (static_cast<uint32_t>(float_of_bits(size) * 0x1p40f) + random) >> 16;
  }
  return static_cast<uint16_t>(sign | narrow);
}

// A row of 16-bit numbers, with the interface of a float row for the row optimizers. Stores use stochastic rounding:
// rounding to nearest would lose small steps. Random numbers depend on `seed` and the position in the row.
class HalfRow {
 public:
  class Number {
   public:
    HETMPI_SHARED Number(uint16_t* bits, RowType type, uint64_t seed) : bits_(bits), type_(type), seed_(seed) {}
    HETMPI_SHARED operator float() const { return widened(*bits_, type_); }
    HETMPI_SHARED void operator-=(float step) const {
      *bits_ = narrowed(widened(*bits_, type_) - step, type_, static_cast<uint32_t>(mix64(seed_) >> 48));
    }

   private:
    uint16_t* bits_;
    RowType type_;
    uint64_t seed_;
  };

  HETMPI_SHARED HalfRow(uint16_t* numbers, RowType type, uint64_t seed) : numbers_(numbers), type_(type), seed_(seed) {}
  HETMPI_SHARED Number operator[](int64_t d) const {
    return Number(numbers_ + d, type_, seed_ + static_cast<uint64_t>(d));
  }

 private:
  uint16_t* numbers_;
  RowType type_;
  uint64_t seed_;
};

// Seed for the stores to the row of `key` when its clock becomes `clock`.
HETMPI_SHARED uint64_t row_seed(int64_t key, int32_t clock) {
  return mix64(mix64(static_cast<uint64_t>(key)) ^ static_cast<uint32_t>(clock));
}

}  // namespace hetmpi
