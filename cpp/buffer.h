// Buffer: an array in host memory, shared by all that keep it: copies refer to the same numbers.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

namespace hetmpi {

template <typename T>
class Buffer {
 public:
  Buffer() = default;
  // memory: of `size` numbers.
  Buffer(std::shared_ptr<void> memory, int64_t size) : memory_(std::move(memory)), size_(size) {}

  // New memory of n numbers, undefined.
  static Buffer of(int64_t n) {
    return {std::shared_ptr<void>(new T[n], [](void* memory) { delete[] static_cast<T*>(memory); }), n};
  }

  T* data() const { return static_cast<T*>(memory_.get()); }
  int64_t size() const { return size_; }
  T* begin() const { return data(); }
  T* end() const { return data() + size_; }
  T& operator[](int64_t i) const { return data()[i]; }
  const std::shared_ptr<void>& memory() const { return memory_; }

 private:
  std::shared_ptr<void> memory_;
  int64_t size_ = 0;
};

}  // namespace hetmpi
