// Arrays that a GPU can access: __cuda_array_interface__, or numpy arrays in pinned memory; and CUDA streams as
// integers.
#pragma once

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/cuda_cache.h"
#include "python/bindings.h"

namespace hetmpi {

template <typename T>
inline constexpr const char* kTypes = nullptr;  // as __cuda_array_interface__ writes them; bool or uint8 for bytes
template <>
inline constexpr const char* kTypes<int64_t> = "<i8";
template <>
inline constexpr const char* kTypes<int32_t> = "<i4";
template <>
inline constexpr const char* kTypes<float> = "<f4";
template <>
inline constexpr const char* kTypes<uint8_t> = "|b1 |u1";

template <typename Lengths>
std::string text_of(const Lengths& lengths) {
  std::string text = "(";
  for (const ssize_t length : lengths) text += std::to_string(length) + ",";
  return text + ")";
}

// The description of an array's memory: __cuda_array_interface__ or __array_interface__. Raises TypeError.
inline py::dict interface_of(const py::object& array, const char* name) {
  for (const char* interface : {"__cuda_array_interface__", "__array_interface__"}) {
    try {
      return array.attr(interface);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_AttributeError)) throw;
    }
  }
  throw py::type_error(std::string(name) + " must be an array, got " + std::string(py::str(py::type::of(array))));
}

// Memory of a Python array: contiguous, of this shape, on this GPU or in pinned host memory. T const: read-only. Raises
// TypeError or ValueError that names the actual value.
template <typename T>
T* memory_of(const py::object& array, const char* name, std::initializer_list<ssize_t> shape, int device) {
  using Value = std::remove_const_t<T>;
  const py::dict about = interface_of(array, name);
  const std::string type = py::cast<std::string>(about["typestr"]);
  const auto found = py::cast<std::vector<ssize_t>>(about["shape"]);
  bool fits = std::string(kTypes<Value>).find(type) != std::string::npos &&
              std::equal(found.begin(), found.end(), shape.begin(), shape.end());
  const bool is_empty = std::find(found.begin(), found.end(), 0) != found.end();
  if (!is_empty && about.contains("strides") && !about["strides"].is_none()) {
    const auto strides = py::cast<std::vector<ssize_t>>(about["strides"]);
    ssize_t expected = sizeof(T);
    for (size_t axis = found.size(); axis-- > 0; expected *= found[axis])
      fits = fits && (found[axis] == 1 || strides[axis] == expected);
  }
  if (!fits)
    throw std::invalid_argument(std::string(name) + " must be contiguous, of type " + kTypes<Value> + " and shape " +
                                text_of(shape) + ", got " + type + " and " + text_of(found));
  const py::tuple data = about["data"];
  if (!std::is_const_v<T> && py::cast<bool>(data[1]))
    throw std::invalid_argument(std::string(name) + " may not be written to");
  T* memory = reinterpret_cast<T*>(py::cast<uintptr_t>(data[0]));
  if (!is_empty && !can_use(device, memory))
    throw std::invalid_argument(std::string(name) + " must lie in the memory of GPU " + std::to_string(device) +
                                " or in pinned memory of the host");
  return memory;
}

inline ssize_t length_of(const py::object& array) { return py::len(array); }

inline Stream stream_of(uintptr_t stream) { return reinterpret_cast<Stream>(stream); }

}  // namespace hetmpi
