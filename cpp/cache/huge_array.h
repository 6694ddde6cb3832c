// HugeArray: a large array of floats on huge pages if the kernel provides them. Rows are read at random; with small
// pages address translation takes a good part of the time. Memory is allocated as it is touched, or by populate().
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
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
    bytes_ = (n * sizeof(float) + page - 1) / page * page;
    floats_.reset(static_cast<float*>(std::aligned_alloc(page, bytes_)));
    if (!floats_) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (page == kPage) madvise(floats_.get(), bytes_, MADV_HUGEPAGE);
#endif
  }

  // Allocates the memory of a large array, until `stop`; for a thread, so that the first use of a page need not wait
  // for the kernel to clear it. Another thread may use the array meanwhile. No effect on Linux before 5.14.
  void populate(const std::atomic<bool>& stop) const {
    constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older C libraries do not name
    constexpr size_t kAtOnce = 8 * kPage;
    if (bytes_ < kLeast) return;
    char* const begin = reinterpret_cast<char*>(floats_.get());
    for (size_t at = 0; at < bytes_ && !stop; at += kAtOnce)
      if (madvise(begin + at, std::min(kAtOnce, bytes_ - at), kPopulateWrite) != 0) return;
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
  size_t bytes_ = 0;
};

}  // namespace hetmpi
