// HugeArray: a large array of floats on huge pages where the kernel gives them: rows are read at random, and with small
// pages most of the time goes into finding the page. Untouched memory costs nothing.
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
    const size_t page = n * sizeof(float) < kLeast ? kSmallPage : kPage;
    const size_t bytes = (n * sizeof(float) + page - 1) / page * page;
    floats_.reset(static_cast<float*>(std::aligned_alloc(page, bytes)));
    if (!floats_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (page == kPage) madvise(floats_.get(), bytes, MADV_HUGEPAGE);
#endif
  }

  float* at(int64_t i) { return floats_.get() + i; }
  const float* at(int64_t i) const { return floats_.get() + i; }

 private:
  static constexpr size_t kPage = size_t{2} << 20, kSmallPage = 4096;
  static constexpr size_t kLeast = 8 * kPage;  // below it the processor's table of small pages does
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> floats_;
};

}  // namespace hetmpi
