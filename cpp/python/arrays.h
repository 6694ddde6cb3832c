// numpy arrays: checks of their shapes and values; messages, and other memory of the core, as arrays.
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "buffer.h"
#include "client/lines.h"
#include "python/bindings.h"
#include "vectors.h"
#include "wire/sections.h"

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

// Keeps Python's object until the core needs it no more, in whichever thread.
template <typename Object>
std::shared_ptr<Object> kept(Object object) {
  const auto free = [](Object* of) {
    py::gil_scoped_acquire acquire;
    delete of;
  };
  return std::shared_ptr<Object>(new Object(std::move(object)), free);
}

// The memory of a tensor (n, dim), of whichever processor.
inline ModelRows device_rows_of(const py::object& tensor, int64_t n) {
  auto* at = reinterpret_cast<float*>(tensor.attr("data_ptr")().cast<uintptr_t>());
  return {at, n, kept(tensor)};
}

// Raises NotFinite if gradients (n, width) of keys (n), or sums of gradients, are NaN or infinite.
inline void refuse_if_not_finite(const int64_t* keys, int64_t n, const float* values, int64_t width) {
  if (is_finite(values, n * width)) return;
  const py::gil_scoped_acquire acquire;
  const Array<float> rows({static_cast<ssize_t>(n), static_cast<ssize_t>(width)}, values);
  py::module_::import("hetmpi.table.client").attr("check_finite")(Array<int64_t>(n, keys), rows);
}

inline Words words_in(Array<int64_t> message) {
  check_shape(message, "message", {-1});
  const int64_t* at = message.data();
  const auto num = static_cast<int64_t>(message.shape(0));
  return {at, num, kept(std::move(message))};
}

// Owns what keeps an array's memory.
template <typename Owner>
py::capsule owner_of(Owner owner) {
  return py::capsule(new Owner(std::move(owner)), [](void* of) { delete static_cast<Owner*>(of); });
}

// The array (n) of a vector, without a copy.
inline Array<int64_t> array_of(std::vector<int64_t>&& values) {
  auto owner = std::make_shared<std::vector<int64_t>>(std::move(values));
  const auto n = static_cast<ssize_t>(owner->size());
  const int64_t* at = owner->data();
  return Array<int64_t>(n, at, owner_of(std::move(owner)));
}

inline Array<int64_t> array_of(Words words) {
  const int64_t *at = words.at, num = words.num;
  return Array<int64_t>(num, at, owner_of(std::move(words)));
}

// The memory of an array, as numbers of the core.
template <typename T>
Buffer<T> buffer_of(Array<T> array) {
  T* at = array.mutable_data();
  const int64_t n = array.size();
  return {std::shared_ptr<void>(kept(std::move(array)), at), n};
}

// The same as masks (n,) bool.
inline Buffer<uint8_t> buffer_of(Array<bool> array) {
  auto* at = reinterpret_cast<uint8_t*>(array.mutable_data());
  const int64_t n = array.size();
  return {std::shared_ptr<void>(kept(std::move(array)), at), n};
}

// The numbers of a buffer as an array of this shape; bytes are masks.
template <typename T>
auto array_of(const Buffer<T>& buffer, std::vector<ssize_t> shape) {
  using Value = std::conditional_t<std::is_same_v<T, uint8_t>, bool, T>;
  return Array<Value>(std::move(shape), reinterpret_cast<const Value*>(buffer.data()), owner_of(buffer.memory()));
}

template <typename T>
auto array_of(const Buffer<T>& buffer) {
  return array_of(buffer, {static_cast<ssize_t>(buffer.size())});
}

}  // namespace hetmpi
