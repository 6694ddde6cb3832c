// Huge pages for memory that processes share, which the kernel does not give by itself. Rows are read at random, and
// with small pages address translation takes a fifth of that time.
#pragma once

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <thread>

namespace hetmpi {

constexpr size_t kHugePage = size_t{2} << 20, kPage = 4096;

// The next multiple of a huge page.
inline uintptr_t to_huge_page(uintptr_t address) { return (address + kHugePage - 1) / kHugePage * kHugePage; }

// Maps shared memory a second time, at an address equal to its offset in the file modulo 2 MB: only there can the
// kernel map huge pages. data() is the memory itself where that is not possible: for private memory, and under a limit
// of addresses (ulimit -v), which would count it twice.
class AlignedView {
 public:
  AlignedView(void* memory, size_t bytes) : data_(memory), bytes_(bytes), reserved_bytes_(bytes + 3 * kHugePage) {
    rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY) return;
    const uintptr_t at = reinterpret_cast<uintptr_t>(memory), first = at / kPage * kPage;
    const size_t length = (at + bytes - first + kPage - 1) / kPage * kPage;  // whole pages
    // With an old size of 0 it maps shared memory once more, and refuses private memory.
    void* const mapped = remap(reinterpret_cast<void*>(first), 0, length, MREMAP_MAYMOVE, nullptr);
    if (mapped == MAP_FAILED) return;
    reserved_ = mmap(nullptr, reserved_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved_ != MAP_FAILED) {
      const uintptr_t place = to_huge_page(reinterpret_cast<uintptr_t>(reserved_)) + offset_in_file(first) % kHugePage;
      void* const target = reinterpret_cast<void*>(place);
      if (remap(mapped, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, target) == target)
        data_ = static_cast<char*>(target) + (at - first);
    }
    if (data_ == memory) munmap(mapped, length);
  }
  ~AlignedView() {
    if (reserved_ != MAP_FAILED) munmap(reserved_, reserved_bytes_);
  }
  AlignedView(const AlignedView&) = delete;

  void* data() const { return data_; }

  // Allocates the memory as huge pages, as far as whole ones fit and the kernel can (Linux 6.1 or later). Writes a zero
  // to each first: the kernel collapses none without a page, and would copy pages that hold data. REQUIRES: the memory
  // holds nothing.
  void populate() const {
    constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older C libraries do not name
    const uintptr_t begin = to_huge_page(reinterpret_cast<uintptr_t>(data_));
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data_) + bytes_) / kHugePage * kHugePage;
    if (begin >= end) return;
    void* const pages = reinterpret_cast<void*>(begin);
    madvise(pages, end - begin, MADV_HUGEPAGE);  // enough for memory of one process
    for (uintptr_t page = begin; page < end; page += kHugePage) *reinterpret_cast<volatile char*>(page) = 0;
    // While another process holds one of the pages for a moment, its huge page is left out.
    for (int tries = 0; tries < 10 && madvise(pages, end - begin, kCollapse) != 0 && errno == EAGAIN; ++tries)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }

 private:
  // mremap() of the kernel: UCX, which some MPIs load, puts a function in its place that forgets `to`.
  static void* remap(void* from, size_t from_bytes, size_t to_bytes, int flags, void* to) {
    return reinterpret_cast<void*>(syscall(SYS_mremap, from, from_bytes, to_bytes, flags, to));
  }

  // The place of an address in the file that is mapped there; 0 if there is none.
  static uintptr_t offset_in_file(uintptr_t address) {
    const std::unique_ptr<FILE, int (*)(FILE*)> maps(std::fopen("/proc/self/maps", "r"), &std::fclose);
    unsigned long begin = 0, end = 0, offset = 0;
    while (maps && std::fscanf(maps.get(), "%lx-%lx %*s %lx%*[^\n]", &begin, &end, &offset) == 3)
      if (begin <= address && address < end) return offset + (address - begin);
    return 0;
  }

  void* data_;
  size_t bytes_;
  void* reserved_ = MAP_FAILED;
  size_t reserved_bytes_;
};

}  // namespace hetmpi
