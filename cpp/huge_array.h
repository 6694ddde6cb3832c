// HugeArray: a large array of floats on huge pages where the kernel gives them: rows are read at random, and with small pages
// most of the time goes into finding the page. Untouched memory costs nothing.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace hetmpi {

class HugeArray {
 public:
  HugeArray() = default;
  explicit HugeArray(int64_t n) {
    if (n == 0) return;
    const size_t bytes = (n * sizeof(float) + kPage - 1) / kPage * kPage;
    floats_.reset(static_cast<float*>(std::aligned_alloc(kPage, bytes)));
    if (!floats_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    madvise(floats_.get(), bytes, MADV_HUGEPAGE);
#endif
  }

  float* at(int64_t i) { return floats_.get() + i; }
  const float* at(int64_t i) const { return floats_.get() + i; }

 private:
  static constexpr size_t kPage = size_t{2} << 20;
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> floats_;
};

}  // namespace hetmpi
