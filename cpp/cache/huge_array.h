// HugeArray: a large array of floats on huge pages if the kernel provides them. Rows are read at random; with small
// pages address translation takes most of the time. Untouched memory is not allocated.
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
  static constexpr size_t kLeast = 8 * kPage;  // below it the TLB suffices for small pages
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> floats_;
};

}  // namespace hetmpi
