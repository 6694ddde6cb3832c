// numpy arrays, and checks of their shapes and values.
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "python/bindings.h"

namespace hetmpi {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

inline std::string shape_of(const py::array& array) {
  std::string text = "(";
  for (ssize_t i = 0; i < array.ndim(); ++i) text += (i ? ", " : "") + std::to_string(array.shape(i));
  return text + (array.ndim() == 1 ? ",)" : ")");
}

// Raises ValueError unless `array` has the given shape; -1 admits any length.
inline void check_shape(const py::array& array, const char* name, std::initializer_list<ssize_t> shape) {
  bool matches = array.ndim() == static_cast<ssize_t>(shape.size());
  ssize_t axis = 0;
  std::string expected = "(";
  for (ssize_t length : shape) {
    matches = matches && (length < 0 || array.shape(axis) == length);
    expected += (axis++ ? ", " : "") + (length < 0 ? std::string("*") : std::to_string(length));
  }
  if (!matches)
    throw std::invalid_argument(std::string(name) + " must have shape " + expected + "), got " + shape_of(array));
}

// Raises IndexError unless all of values (n) lie in [least, limit).
inline void check_in(const int64_t* values, ssize_t n, int64_t limit, const char* name, int64_t least = 0) {
  for (ssize_t i = 0; i < n; ++i)
    if (values[i] < least || values[i] >= limit)
      throw std::out_of_range(std::string(name) + " must lie in [" + std::to_string(least) + ", " +
                              std::to_string(limit) + "), got " + std::to_string(values[i]));
}

}  // namespace hetmpi
